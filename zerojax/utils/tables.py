"""Tables that follow the width of the terminal, and never cut a name."""

from __future__ import annotations

import dataclasses
import itertools
import math
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zerojax.utils.text import SPACE, pieces, wrapped

FILE_WIDTH = 120
_UNLIMITED = 10**6  # of rows in a file or a pipe, where a text has FILE_WIDTH
_GAP = 2  # between two columns


class Screen(NamedTuple):
    """Where a text is shown."""

    width: int
    folds: bool  # whether equal layers are shown as one row; a file has a row for each, so that it can be searched


TO_FILE = Screen(FILE_WIDTH, folds=False)


def screen() -> Screen:
    """The terminal that the program writes to, a notebook, or a file or pipe, whose rows are one line each.

    The variable COLUMNS sets the width.
    """
    is_terminal = getattr(sys.stdout, "isatty", lambda: False)()  # programs replace it
    folds = is_terminal or "ipykernel" in sys.modules
    return Screen(shutil.get_terminal_size((FILE_WIDTH if folds else _UNLIMITED, 0)).columns, folds)


class Column(NamedTuple):
    """A column: its header, whether its texts are broken into lines if the table is too wide, and its alignment."""

    header: str
    wraps: bool = False
    right: bool = False


@dataclasses.dataclass(frozen=True)
class TextTable:
    """A table of texts."""

    title: str  # a text above the table, or ''
    columns: Sequence[Column]
    # The texts of each row. A space that is no place to break a line is written as `zerojax.utils.text.SPACE`.
    rows: Sequence[Sequence[str]]

    def text(self, width: int) -> str:
        """The table as lines of at most `width`, if names leave it a choice."""
        # Choose the widths: what is too much is taken from the columns that wrap, by what each of them can lose.
        cells = [[column.header, *(row[k] for row in self.rows)] for k, column in enumerate(self.columns)]
        most = [max(map(len, texts)) for texts in cells]
        slack = [
            size - _least(texts) if c.wraps else 0 for c, texts, size in zip(self.columns, cells, most, strict=True)
        ]
        excess = sum(most) + _GAP * (len(most) - 1) - width
        share = min(max(excess / max(sum(slack), 1), 0), 1)
        widths = [size - math.ceil(share * could) for size, could in zip(most, slack, strict=True)]

        # Write the rows, each of which has as many lines as its longest cell.
        lines: list[str] = []
        for number, row in enumerate([[column.header for column in self.columns], *self.rows]):
            wrapped_cells = [wrapped(text, size) for text, size in zip(row, widths, strict=True)]
            for texts in itertools.zip_longest(*wrapped_cells, fillvalue=""):
                aligned = [
                    text.rjust(size) if column.right else text.ljust(size)
                    for column, text, size in zip(self.columns, texts, widths, strict=True)
                ]
                lines.append((" " * _GAP).join(aligned).rstrip().replace(SPACE, " "))
            if not number:
                lines.append("─" * (sum(widths) + _GAP * (len(widths) - 1)))
        return "\n".join([*(paragraph(self.title, width) if self.title else []), *lines])


def _least(texts: Iterable[str]) -> int:
    """The length of the longest name."""
    return max((len(piece) for text in texts for word in text.split(" ") for piece in pieces(word)), default=0)


def paragraph(text: str, width: int) -> list[str]:
    """The lines of a text, in which each line keeps its indent when it is broken."""
    lines, width = [], FILE_WIDTH if width == _UNLIMITED else width
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()))
        lines += [(indent + each).rstrip() for each in wrapped(line.lstrip(), width - len(indent))]
    return lines


def printed(parts: Iterable[TextTable | str], width: int) -> str:
    """Tables and texts, separated by empty lines."""
    texts = [part.text(width) if isinstance(part, TextTable) else "\n".join(paragraph(part, width)) for part in parts]
    return _encodable("\n\n".join(texts) + "\n")


def _encodable(text: str) -> str:
    """The text with what the terminal cannot show, such as one for ASCII, replaced."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate({ord("─"): "-", ord("×"): "x"}).encode(encoding, "replace").decode(encoding)
    return text
