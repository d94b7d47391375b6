"""Tables that follow the width of the terminal, and never cut a name."""

from __future__ import annotations

import dataclasses
import html
import itertools
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zerojax.utils.text import SPACE, pieces, wrapped

FILE_WIDTH = 120
_GAP = "  "  # between two columns


class Screen(NamedTuple):
    """Where a text is shown.

    Attributes:
        width: the number of columns.
        folds: whether equal layers are shown as one row. A file has a row for each, so that it can be searched.
    """

    width: int
    folds: bool


TO_FILE = Screen(FILE_WIDTH, folds=False)


def screen() -> Screen:
    """The terminal that the program writes to, a notebook, or `TO_FILE`. The variable COLUMNS sets the width."""
    is_terminal = getattr(sys.stdout, "isatty", lambda: False)()  # programs replace it
    is_notebook = "ipykernel" in sys.modules
    return Screen(shutil.get_terminal_size((FILE_WIDTH, 0)).columns, is_notebook or is_terminal)


class Column(NamedTuple):
    """A column: its header, whether its texts are broken into lines if the table is too wide, and its alignment."""

    header: str
    wraps: bool = False
    right: bool = False


@dataclasses.dataclass(frozen=True)
class TextTable:
    """A table of texts.

    Columns that do not wrap have the width of their texts. The others have at least the width of the longest name in
    them; what is left, the first of them takes first.

    Attributes:
        title: a text above the table, or ''.
        columns: a `Column` for each.
        rows: the texts of each row. A space that is no place to break a line is written as `zerojax.utils.text.SPACE`.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]

    def text(self, width: int) -> str:
        """The table as lines of at most `width`, if names leave it a choice."""
        cells = [[column.header, *(row[k] for row in self.rows)] for k, column in enumerate(self.columns)]
        most = [max(map(len, texts)) for texts in cells]
        fixed = [not column.wraps for column in self.columns]
        least = [size if is_fixed else _least(texts) for is_fixed, texts, size in zip(fixed, cells, most, strict=True)]
        widths = _shared(least, most, width - len(_GAP) * (len(self.columns) - 1))
        rule = ["─" * size for size in widths]
        header, *rows = ([column.header for column in self.columns], *self.rows)
        lines = [*self._lines(header, widths), _GAP.join(rule), *(x for row in rows for x in self._lines(row, widths))]
        return "\n".join([*(paragraph(self.title, width) if self.title else []), *lines])

    def _lines(self, row: Sequence[str], widths: Sequence[int]) -> Iterable[str]:
        """The lines of a row, as many as the cell with the most."""
        wrapped_cells = [
            wrapped(cell, size) if column.wraps else [cell]
            for cell, size, column in zip(row, widths, self.columns, strict=True)
        ]
        for line in itertools.zip_longest(*wrapped_cells, fillvalue=""):
            aligned = [
                cell.rjust(size) if column.right else cell.ljust(size)
                for cell, size, column in zip(line, widths, self.columns, strict=True)
            ]
            yield _GAP.join(aligned).rstrip().replace(SPACE, " ")


def _least(texts: Iterable[str]) -> int:
    """The length of the longest name."""
    return max((len(piece) for text in texts for word in text.split(" ") for piece in pieces(word)), default=0)


def _shared(least: Sequence[int], most: Sequence[int], available: int) -> list[int]:
    """Widths between the least and the most of each column; from left to right, columns take of what is available."""
    left, widths = max(0, available - sum(least)), []
    for a, b in zip(least, most, strict=True):
        widths.append(a + min(left, b - a))
        left -= widths[-1] - a
    return widths


def paragraph(text: str, width: int) -> list[str]:
    """The lines of a text, in which each line keeps its indent when it is broken."""
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()))
        lines += [(indent + each).rstrip() for each in wrapped(line.lstrip(), width - len(indent))]
    return lines


def printed(parts: Iterable[TextTable | str], width: int) -> str:
    """Tables and texts, separated by empty lines."""
    texts = [part.text(width) if isinstance(part, TextTable) else "\n".join(paragraph(part, width)) for part in parts]
    return "\n\n".join(texts) + "\n"


_OPEN_ROWS = 12  # of a table that is shown before it is opened


def sections_html(parts: Iterable[TextTable | str]) -> str:
    """Tables and texts for a notebook. A long table is a section that opens."""
    sections = []
    for part in parts:
        if isinstance(part, str):
            sections.append(f"<pre>{html.escape(part)}</pre>")
            continue
        text = html.escape(dataclasses.replace(part, title="").text(FILE_WIDTH))
        is_open = " open" if len(part.rows) <= _OPEN_ROWS else ""
        sections.append(f"<details{is_open}><summary>{html.escape(part.title)}</summary><pre>{text}</pre></details>")
    return "\n".join(sections)
