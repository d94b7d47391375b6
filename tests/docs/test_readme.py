"""The documentation: its code runs and its links work.

Also checks that imports follow the order of the architecture, and that every public name has a docstring.
"""

import fnmatch
import inspect
import re
import runpy

import pytest
from support.paths import REPO

import zerojax

DOCS = sorted((REPO / "docs").rglob("*.md"))
PAGES = [REPO / "README.md", *DOCS]
LINKED = [*PAGES, REPO / "CONTRIBUTING.md", REPO / "CHANGELOG.md", REPO / "SECURITY.md"]
MODULES = runpy.run_path(str(REPO / "scripts" / "modules.py"))


def blocks():
    """Yields (page, first line, code) for each block of Python code. Blocks for described devices need a compiler."""
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line, code = text[: match.start(1)].count("\n"), match[1]
            title = re.findall(r"^#+ (.*)$", text[: match.start()], re.MULTILINE)[-1]
            marks = [pytest.mark.aot] if "targets.devices(" in code else []
            yield pytest.param(page, line, code, id=f"{page.relative_to(REPO)}: {title}, line {line}", marks=marks)


@pytest.mark.parametrize(("page", "line", "code"), list(blocks()))
def test_code_runs_by_itself(page, line, code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile("\n" * line + code, page, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


def anchors(page):
    """The anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(REPO)))
def test_links_have_a_target(page):
    for link in re.findall(r"\]\((?!https?:)([^)]*)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists() and (not anchor or anchor in anchors(target)), link


def test_the_readme_is_short_and_links_to_the_site():
    text = (REPO / "README.md").read_text()
    assert text.count("\n") <= 300
    assert "(docs/index.md)" in text and "scripts/docs" in text


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(REPO)))
def test_every_page_is_in_a_table_of_contents(page):
    """Those of docs/index.md and docs/api/index.md, whose entries may be globs. The build of the site checks it too."""
    listed = ["index"]
    for contents in REPO / "docs" / "index.md", REPO / "docs" / "api" / "index.md":
        folder = contents.parent.relative_to(REPO / "docs")
        for block in re.findall(r"^```\{toctree\}\n(.*?)^```$", contents.read_text(), re.MULTILINE | re.DOTALL):
            entries = [re.sub(r".*<(.*)>", r"\1", line) for line in block.splitlines() if line and line[0] != ":"]
            listed += [(folder / entry).as_posix() for entry in entries]
    name = page.relative_to(REPO / "docs").with_suffix("").as_posix()
    assert any(fnmatch.fnmatchcase(name, entry) for entry in listed), f"add {name} to a toctree of docs/index.md"


def test_the_tests_that_the_documentation_names_exist():
    named = set(re.findall(r"test_\w+\.py", (REPO / "docs" / "what_is_checked.md").read_text()))
    assert named <= {path.name for path in (REPO / "tests").rglob("test_*.py")}


def test_every_module_has_a_place_in_the_architecture():
    assert {MODULES["top"](module) for module in MODULES["modules"]()} <= set(MODULES["ORDER"])


@pytest.mark.parametrize("module", MODULES["modules"]())
def test_imports_follow_the_order_of_the_architecture(module):
    rank, known = MODULES["rank"], MODULES["modules"]()
    assert [name for name, _ in MODULES["imports"](module, known) if rank(name) > rank(module)] == []


def test_no_modules_import_each_other():
    edges = MODULES["import_graph"]()
    assert MODULES["cycle"](edges) == [] and MODULES["cycle"](MODULES["by_folder"](edges)) == []


@pytest.mark.parametrize("name", zerojax.__all__)
def test_every_public_name_has_a_docstring(name):
    value = getattr(zerojax, name)
    if isinstance(value, str):
        assert name == "__version__"
        return
    assert inspect.getdoc(value)
    if inspect.isclass(value):
        methods = {key: member for key, member in vars(value).items() if inspect.isfunction(member)}
        assert [key for key, method in methods.items() if not key.startswith("_") and not method.__doc__] == []
