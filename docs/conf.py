"""Sphinx configuration."""

from __future__ import annotations

from chorister import __version__

project = "Chorister"
author = "The Chorister authors"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "Chorister"
html_static_path: list[str] = []
exclude_patterns = ["_build"]
nitpicky = False
