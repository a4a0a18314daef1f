"""Sphinx configuration."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import generated  # noqa: E402 (next to this file)
from pydantic import BaseModel  # noqa: E402
from sphinx.application import Sphinx  # noqa: E402

from chorister import __version__  # noqa: E402

project = "Chorister"
author = "The Chorister authors"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
add_module_names = False
html_theme = "furo"
html_title = "Chorister"
html_static_path: list[str] = []
exclude_patterns = ["_build"]
nitpicky = False
smartquotes = False  # keep `--json` as two hyphens

# Before Sphinx collects the pages.
generated.write(HERE / "reference")


def without_fields(
    _app: Sphinx, _what: str, _name: str, described: object, _options: object, *_: object
) -> tuple[str, str] | None:
    """Hide the signature of a pydantic model: its fields are listed one by one."""
    if isinstance(described, type) and issubclass(described, BaseModel):
        return "", ""
    return None


def setup(app: Sphinx) -> None:
    """Connect to Sphinx."""
    app.connect("autodoc-process-signature", without_fields)
