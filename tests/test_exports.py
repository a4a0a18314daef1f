"""The public surface, pinned: whoever changes it changes this list too."""

from __future__ import annotations

from importlib import metadata

import chorister
from chorister import errors


def test_the_package_exports_what_it_promises() -> None:
    assert chorister.__all__ == ["__version__"]


def test_the_version_is_the_distributions() -> None:
    assert chorister.__version__ == metadata.version("chorister")


def test_every_error_is_exported_documented_and_in_the_tree() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    assert sorted(defined) == errors.__all__
    assert errors.__doc__ is not None
    for name in defined:
        assert issubclass(getattr(errors, name), errors.ChoristerError)
        assert getattr(errors, name).__doc__
        assert f" {name} " in errors.__doc__.replace("\n", " ")
