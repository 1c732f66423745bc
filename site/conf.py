"""How Sphinx builds the site: see `tools.site`."""

from rlcourse import __version__
from rlcourse.course import REPOSITORY

project = "rlcourse"
version = release = __version__
extensions = ["myst_nb", "sphinx_design", "sphinx-mathjax-offline"]  # formulas need no network either
exclude_patterns = ["README.md"]
nb_execution_mode = "off"
nb_render_markdown_format = "myst"  # CommonMark, the default, has no tables
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 3
html_theme = "sphinx_book_theme"
html_title = "rlcourse"
html_copy_source = False
html_theme_options = {
    "repository_url": f"https://github.com/{REPOSITORY}",
    "use_repository_button": True,
    "show_navbar_depth": 1,
    "navbar_persistent": [],  # the sidebar has a search field
}
html_static_path = ["_static"]
html_css_files = ["wide.css"]
