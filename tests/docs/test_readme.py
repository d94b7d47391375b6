"""The documentation: its code runs, its links work, and the files that it names exist."""

import fnmatch
import re

import pytest
from support.paths import REPO

DOCS = sorted((REPO / "docs").rglob("*.md"))
PAGES = [REPO / "README.md", *DOCS]
LINKED = [*PAGES, REPO / "CONTRIBUTING.md", REPO / "CHANGELOG.md", REPO / "SECURITY.md"]


def blocks(page):
    """Yields (line, code) for each block of Python code of a page."""
    text = page.read_text()
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text[: match.start(1)].count("\n"), match[1]


def pages_with_code():
    """Yields (page, whether its blocks for described devices are meant, which need a compiler)."""
    for page in PAGES:
        for described in sorted({"targets.devices(" in code for _, code in blocks(page)}):
            marks = [pytest.mark.aot] if described else []
            yield pytest.param(page, described, id=f"{page.relative_to(REPO)}{'-aot' * described}", marks=marks)


@pytest.mark.parametrize(("page", "described"), list(pages_with_code()))
def test_each_block_of_code_runs_by_itself(page, described, tmp_path, monkeypatch, capsys):
    for line, code in blocks(page):
        if ("targets.devices(" in code) == described:
            folder = tmp_path / str(line)
            folder.mkdir()
            monkeypatch.chdir(folder)
            exec(compile("\n" * line + code, page, "exec"), {"__name__": "__main__"})
            assert capsys.readouterr().out, f"the block at line {line} prints nothing"


def anchors(page):
    """The anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_links_have_a_target():
    broken = []
    for page in LINKED:
        for link in re.findall(r"\]\((?!https?:)([^)]*)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(REPO)}: {link}")
    assert not broken


def test_every_page_is_in_a_table_of_contents():
    """Those of docs/index.md and docs/api/index.md, whose entries may be globs. The build of the site checks it too."""
    listed = ["index"]
    for contents in REPO / "docs" / "index.md", REPO / "docs" / "api" / "index.md":
        folder = contents.parent.relative_to(REPO / "docs")
        for block in re.findall(r"^```\{toctree\}\n(.*?)^```$", contents.read_text(), re.MULTILINE | re.DOTALL):
            entries = [re.sub(r".*<(.*)>", r"\1", line) for line in block.splitlines() if line and line[0] != ":"]
            listed += [(folder / entry).as_posix() for entry in entries]
    names = [page.relative_to(REPO / "docs").with_suffix("").as_posix() for page in DOCS]
    missing = [name for name in names if not any(fnmatch.fnmatchcase(name, entry) for entry in listed)]
    assert not missing, f"add to a toctree of docs/index.md: {missing}"


def test_the_files_that_the_documentation_names_exist():
    """Scripts on every page but the changelog, and the test modules of docs/what_is_checked.md."""
    current = [page for page in LINKED if page.name != "CHANGELOG.md"]
    scripts = {name for page in current for name in re.findall(r"\bscripts/[\w/]+(?:\.\w+)?", page.read_text())}
    scripts.discard("scripts/benchmarks/NAME.py")  # stands for any of them
    assert sorted(name for name in scripts if not (REPO / name).exists()) == []
    tests = {path.relative_to(REPO / "tests").as_posix() for path in (REPO / "tests").rglob("test_*.py")}
    named = set(re.findall(r"[\w/]*\btest_\w+\.py", (REPO / "docs" / "what_is_checked.md").read_text()))
    assert sorted(name for name in named if not any(f"/{test}".endswith(f"/{name}") for test in tests)) == []
