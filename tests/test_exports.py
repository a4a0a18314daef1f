"""The public surface, pinned: whoever changes it changes this list too."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import chorister
from chorister import errors
from tests.conftest import REPOSITORY


def test_the_package_exports_what_it_promises() -> None:
    assert chorister.__all__ == [
        "Policy",
        "Question",
        "Result",
        "Study",
        "Track",
        "Trend",
        "__version__",
        "categories",
        "connect",
        "crosstab",
        "discover_ngrams",
        "discover_words",
        "distribution",
        "errors",
        "grid",
        "heatmap",
        "intervals",
        "prefix_tree",
        "rehearse",
    ]
    for name in chorister.__all__:
        assert getattr(chorister, name) is not None
    assert set(chorister.__all__) <= set(dir(chorister))


def test_the_types_of_the_package_name_the_same() -> None:
    stub = (Path(chorister.__file__).parent / "__init__.pyi").read_text()
    listed = re.findall(r'^    "(\w+)",$', stub, re.MULTILINE)
    assert listed == chorister.__all__


def test_the_package_loads_without_frames_charts_and_servers() -> None:
    """`pip install chorister` alone: what the extras bring is not there."""
    extras = ["polars", "pyarrow", "altair", "vl_convert", "pandas", "starlette", "sqlalchemy"]
    program = f"""
import sys
for name in {extras!r}:
    sys.modules[name] = None
import chorister as ch
for name in ch.__all__:
    getattr(ch, name)
try:
    ch.rehearse({{"age": [1]}}, sys.argv[1])
except ch.errors.InvalidInput as error:
    assert "chorister[analyst]" in str(error), error
else:
    raise SystemExit("polars is not needed?")
"""
    policy = REPOSITORY / "examples" / "keyboard" / "policy.toml"
    subprocess.run([sys.executable, "-c", program, policy], check=True)


def test_the_version_is_the_distributions() -> None:
    assert chorister.__version__ == metadata.version("chorister")


def test_every_error_is_exported_documented_and_in_the_tree() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    assert errors.__doc__ is not None
    assert set(re.findall(r"^(?:    [ │├└─]*)(\w+) *", errors.__doc__, re.MULTILINE)) == defined
    for name in defined:
        assert issubclass(getattr(errors, name), errors.ChoristerError)
        assert getattr(errors, name).__doc__
        assert f" {name} " in errors.__doc__.replace("\n", " ")
