"""Texts of reports: units that fit the size, tables as wide as the terminal, whole names, and folded layers."""

import io
import sys

import pytest

from zerojax.utils.tables import Column, TextTable, paragraph, printed, screen
from zerojax.utils.text import SPACE, abbreviate, bytes_text, count_text, fold, mesh_text, wrapped

PATHS = [f"encoder/layers/{k}/attention/{name}/kernel" for k in range(32) for name in ("query", "value")]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (2**10, "1 KiB"),
        (1.5 * 2**20, "1.50 MiB"),
        (-(2**30), "-1 GiB"),
        (3.14159 * 2**40, "3.14 TiB"),
        (5000 * 2**40, "5,000 TiB"),
    ],
)
def test_bytes_have_the_unit_that_fits(num_bytes, text):
    assert bytes_text(num_bytes) == text


def test_counts_lists_and_meshes():
    assert (count_text(999), count_text(8_030_000_000)) == ("999", "8.03B")
    assert abbreviate(["a", "b", "c"], 2) == "a; b; and 1 more" and abbreviate(["a"], 2) == "a"
    assert mesh_text({"data": 4, "model": 2}) == "data 4 x model 2"


@pytest.mark.parametrize("width", range(9, 60, 5))
def test_names_are_never_cut(width):
    """A line ends at a space, or behind a '/' of a path that is longer than a line."""
    text = f"{PATHS[0]} is replicated: 3 % 8 = 3"
    lines = wrapped(text, width)
    names = [name for word in text.split(" ") for name in word.split("/")]
    assert [name for line in lines for word in line.split(" ") for name in word.split("/") if name] == names
    assert all(len(line) <= width or len(line.rstrip("/")) <= len("replicated:") for line in lines)


def table():
    rows = [[path, "float32[64,64]", bytes_text(2**k), "replicated: 3 % 8 = 3"] for k, path in enumerate(PATHS)]
    columns = [Column("leaf", wraps=True), Column("array"), Column("size", right=True), Column("reason", wraps=True)]
    return TextTable("A title of some words, which is longer than a narrow table", columns, rows)


@pytest.mark.parametrize("width", [60, 80, 120, 150])
def test_a_table_is_as_wide_as_the_terminal(width):
    lines = table().text(width).split("\n")
    assert max(map(len, lines)) <= width and (width < 100 or len(lines) == len(PATHS) + 3)
    for name in ("encoder", "attention", "query", "kernel", "replicated:", "float32[64,64]"):
        assert sum(name in line for line in lines) >= len(PATHS) / 2, name


def test_a_table_that_is_too_narrow_for_its_names_is_wider():
    assert any("float32[64,64]" in line for line in table().text(10).split("\n"))


def test_a_space_that_is_no_place_to_break_a_line():
    rows = [[f"P(None,{SPACE}'data')"]]
    assert "P(None, 'data')" in TextTable("", [Column("spec", wraps=True)], rows).text(5)


def test_paragraphs_keep_their_indents():
    assert paragraph("a b c\n  got:  d e f", 9) == ["a b c", "  got:  d", "  e f"]
    assert printed(["a", "b"], 80) == "a\n\nb\n"


def test_without_a_terminal_a_row_is_a_line_and_a_text_has_120_columns(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    to = screen()
    assert not to.folds
    row, text = " ".join(["word"] * 100), " ".join(["text"] * 100)
    lines = printed([TextTable(text, [Column("name", wraps=True)], [[row]]), text], to.width).splitlines()
    assert lines.count(row) == 1 and max(len(line) for line in lines if "text" in line) <= 120
    monkeypatch.setenv("COLUMNS", "80")
    assert screen().width == 80


def test_a_terminal_for_ascii_gets_ascii(monkeypatch):
    table = TextTable("3 × 4", [Column("name")], [["ü"]])
    assert printed([table], 80) == "3 × 4\nname\n────\nü\n"
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert printed([table], 80) == "3 x 4\nname\n----\n?\n"


def test_equal_layers_are_one_row():
    assert [each.text.replace(SPACE, " ") for each in fold(PATHS, ["same"] * len(PATHS))] == [
        "encoder/layers/*/attention/query/kernel × 32",
        "encoder/layers/*/attention/value/kernel × 32",
    ]
    assert [each.name for each in fold(["Block_0/w", "Block_1/w", "conv1/w", "conv2/w"], [0] * 4)] == [
        "Block_*/w",
        "conv1/w",
        "conv2/w",
    ]


def test_layers_that_differ_are_rows_of_their_own():
    """Every row is in one fold, and a name stands for its rows only."""
    paths = [f"0/mu/layers/{k}/mlp/{j}/w" for k in range(6) for j in range(2)]
    kinds = ["wide" if j and k % 2 else "narrow" if j else "first" for k in range(6) for j in range(2)]
    folds = fold(paths, kinds)
    assert [each.name for each in folds] == [
        "0/mu/layers/*/mlp/0/w",
        "0/mu/layers/{0,2,4}/mlp/1/w",
        "0/mu/layers/{1,3,5}/mlp/1/w",
    ]
    assert sorted(k for each in folds for k in each.members) == list(range(len(paths)))
    assert fold([f"layers/{k}/w" for k in range(9)], [k > 4 for k in range(9)])[0].name == "layers/{0,1,…,4}/w"
    assert [each.name for each in fold(paths, paths)] == paths
