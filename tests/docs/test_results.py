"""The page of results: every number in it is on the page that its row links to, and its commands exist."""

import re

import pytest
from support.paths import REPO

PAGE = REPO / "docs" / "results.md"


def rows():
    """Yields (figure, measured, page, command); a row, or a section, without a link has the one before it."""
    page = None
    for line in PAGE.read_text().splitlines():
        links = [target for target in re.findall(r"\]\(([\w./]+)(?:#[\w-]+)?\)", line) if target.endswith(".md")]
        page = links[0] if links else page
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and cells[0] != "figure":
            yield pytest.param(cells[1], page, cells[3], id=re.sub(r"[^\w ]", "", cells[0])[:50])


ROWS = list(rows())


@pytest.mark.parametrize(("measured", "page", "command"), ROWS)
def test_numbers_are_those_of_the_page(measured, page, command):
    text = (PAGE.parent / page).read_text().replace(",", "")
    known = set(re.findall(r"\d[\d.]*(?:e-\d+)?", text))
    numbers = [number.rstrip(".") for number in re.findall(r"\d[\d.]*(?:e-\d+)?", measured.replace(",", ""))]
    assert numbers and [number for number in numbers if number not in {k.rstrip(".") for k in known}] == []


@pytest.mark.parametrize(("measured", "page", "command"), ROWS)
def test_commands_exist(measured, page, command):
    for script in re.findall(r"scripts/[\w/.]+", command):
        assert (REPO / script).exists(), script
