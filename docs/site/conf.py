"""Sphinx's settings; `python -m docs.site` makes the source folder and runs Sphinx with them."""

from importlib.metadata import version as version_of

project = "gapless"
version = release = version_of("gapless")
author = "the gapless authors"
copyright = f"{author}, Apache-2.0"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"gapless {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
root_doc = "index"
pygments_style, pygments_dark_style = "default", "github-dark"

myst_heading_anchors = 6  # as code hosts make them
myst_enable_extensions = ["attrs_inline"]
myst_linkify_fuzzy_links = False
nb_execution_mode = "off"  # notebook.py has run them

default_role = "code"  # docstrings mark code as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
