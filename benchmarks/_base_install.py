"""An environment with what `pip install chorister` brings and nothing else, made without a network.

What it holds are links to the packages of the running environment.
"""

from __future__ import annotations

import sys
import tomllib
import venv
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parent.parent


def base_requirements(also: Iterable[str] = ()) -> list[Distribution]:
    """What the project needs without any extra, and whatever that needs in turn."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(text) for text in (*project["dependencies"], *also)]
    found: dict[str, Distribution] = {}
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        if name in found:
            continue
        found[name] = distribution(name)
        extras = requirement.extras or {""}
        wanted += [
            needed
            for needed in map(Requirement, found[name].requires or ())
            if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in extras)
        ]
    return list(found.values())


def base_environment(
    folder: Path,
    package: Path = REPOSITORY / "src" / "chorister",
    *,
    also: Iterable[str] = (),
) -> Path:
    """Create a virtual environment with the package and all that it needs; return its Python.

    `also` names distributions that are installed as well.
    """
    venv.create(folder, symlinks=True, with_pip=False)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    for found in base_requirements(also):
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            link = site / top
            if not link.is_symlink():  # two may share a namespace
                link.symlink_to(Path(str(found.locate_file(top))))
    (site / "chorister").symlink_to(package)
    return folder / "bin" / "python"
