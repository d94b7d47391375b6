"""Makes links to files outside of docs/ work in the site, which pages have because they are also read on a forge.

Some of these files are pages of the site too, which include them. Others are offered for download.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

# Files of the repository -> the pages of the site that include them.
INCLUDED = {
    "README.md": "overview",
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "examples/launch/README.md": "launch_scripts",
}
FOLDERS = {"docs/how_to", "docs/migration"}  # their pages are in the table of contents, which every page shows
_LINK = re.compile(r"\]\(([\w./-]+?)(#[\w-]+)?\)")


def rewritten(text: str, folder: str, to_page: str = ".") -> str:
    """The text with links to `INCLUDED` and to pages changed into links that hold in the site.

    Args:
        text: Markdown.
        folder: the folder of the file that the text is from, relative to the repository.
        to_page: the folder of the page that shows it, relative to docs/.
    """

    def link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        if path in INCLUDED:
            path = f"docs/{INCLUDED[path]}.md"
        elif path in FOLDERS:
            path = "docs/index.md"
        return f"]({posixpath.relpath(path, posixpath.join('docs', to_page))}{match[2] or ''})"

    return _LINK.sub(link, text)


def read(app: Any, page: str, source: list[str]) -> None:
    """Rewrites the links of a page; a page of `INCLUDED` gets the text of its file."""
    files = [file for file, included in INCLUDED.items() if included == page]
    folder = posixpath.dirname(page)
    if files:
        text = (Path(app.srcdir).parent / files[0]).read_text()
        app.env.note_dependency(str(Path(app.srcdir).parent / files[0]))
        source[0] = rewritten(text, posixpath.dirname(files[0]), folder)
    else:
        source[0] = rewritten(source[0], posixpath.join("docs", folder), folder)


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", read)
    return {"parallel_read_safe": True}
