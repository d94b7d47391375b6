"""Configuration of the site that Sphinx builds from this folder. `scripts/docs` builds it."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "_ext"))

from zerojax.utils.versions import __version__  # noqa: E402

project = "zerojax"
release = version = __version__
html_title = f"zerojax {release}"
copyright = "the authors of zerojax"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "docstrings",  # the rest are in _ext/
    "public_names",
    "calculator_data",
    "command_line",
    "summary",
]
exclude_patterns = ["_build", "_ext"]

# Pages are Markdown that a forge shows too. Headings get the anchors that GitHub gives them.
myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_merge_streams = True

# Names of zerojax have to exist where a page or a docstring refers to them. Those of other packages would need their
# inventories, which are not fetched: a build needs no network.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!zerojax\.).*")]
default_role = "py:obj"  # `name` in a docstring is code, and a link if the name is public
smartquotes_action = "D"  # dashes only: quotes are those of Python
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Cost", "Source"]

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["zerojax.css"]
html_favicon = "_static/logo.svg"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_logo": "logo.svg",
    "dark_logo": "logo-dark.svg",
    "light_css_variables": {"color-brand-primary": "#0b6e6e", "color-brand-content": "#0b6e6e"},
    "dark_css_variables": {"color-brand-primary": "#5ccaca", "color-brand-content": "#5ccaca"},
}
copybutton_exclude = ".linenos, .gp, .go"
