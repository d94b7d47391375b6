"""Tables that follow the width of the terminal, and never cut a name. Rich draws them."""

from __future__ import annotations

import dataclasses
import io
import math
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerojax.utils.text import SPACE, pieces, wrapped

FILE_WIDTH = 120
_GAP = 2  # between two columns


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
    """A table of texts, which Rich draws.

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
        slack = [
            size - _least(texts) if c.wraps else 0 for c, texts, size in zip(self.columns, cells, most, strict=True)
        ]
        excess = sum(most) + _GAP * (len(most) - 1) - width
        share = min(max(excess / max(sum(slack), 1), 0), 1)  # of what each column could lose
        widths = [size - math.ceil(share * could) for size, could in zip(most, slack, strict=True)]
        table = Table.grid()  # versions of Rich pad in different ways: the gaps are columns
        for k, (column, size) in enumerate(zip(self.columns, widths, strict=True)):
            if k:
                table.add_column(width=_GAP)
            table.add_column(justify="right" if column.right else "left", width=size)
        for row in ([column.header for column in self.columns], *self.rows):
            cells = [Text("\n".join(wrapped(text, size))) for text, size in zip(row, widths, strict=True)]
            table.add_row(*[cell for each in cells for cell in (Text(), each)][1:])
        console = Console(
            file=io.StringIO(),
            width=max(width, sum(most) + _GAP * len(most)),
            color_system=None,
            force_jupyter=False,
            _environ={},
        )
        with console.capture() as drawn:
            console.print(table)
        lines = [line.rstrip().replace(SPACE, " ") for line in drawn.get().rstrip().split("\n")]
        header = max(len(wrapped(column.header, size)) for column, size in zip(self.columns, widths, strict=True))
        lines.insert(header, "─" * (sum(widths) + _GAP * (len(widths) - 1)))
        return "\n".join([*(paragraph(self.title, width) if self.title else []), *lines])


def _least(texts: Iterable[str]) -> int:
    """The length of the longest name."""
    return max((len(piece) for text in texts for word in text.split(" ") for piece in pieces(word)), default=0)


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
