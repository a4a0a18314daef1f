"""Generate the reference pages for commands and for the Python API from the code."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeAlias

import typer

from chorister.cli import app

__all__ = ["PAGES", "commands", "python", "write"]

# Typer's own classes for these are not part of its public API.
Command: TypeAlias = Any
Parameter: TypeAlias = Any
Documented: TypeAlias = Any

# What to import, and who needs it.
_MODULES: Final = {
    "chorister": "For analysts: `import chorister as ch`.",
    "chorister.device": "For apps that embed a device.",
    "chorister.privacy": "The accountant.",
    "chorister.policy": "What a device allows.",
    "chorister.recipe": "A signed question.",
    "chorister.encoding": "From rows to bins.",
    "chorister.errors": "Everything that Chorister raises.",
}


def commands() -> str:
    """Describe every command with its arguments and options."""
    root: Command = typer.main.get_command(app)
    return "\n".join(
        [
            "# Commands",
            "",
            "This page shows the `--help` of every command. Exit codes: 0 done; 1 a check failed;",
            "2 the command line or an input was wrong; 3 a bug in Chorister.",
            *_command(root, ["chorister"]),
            "",
        ]
    )


def _command(command: Command, words: list[str]) -> Iterator[str]:
    name = " ".join(words)
    yield from ("", f"## `{name}`", "", inspect.cleandoc(command.help or ""))
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    children = getattr(command, "commands", {})
    usage = [name, *(_argument(each) for each in arguments)]
    if options:
        usage.append("[OPTIONS]")
    if children:
        usage.append("COMMAND")
    yield from ("", "```text", " ".join(usage), "```")
    rows = [(f"`{_argument(each)}`", getattr(each, "help", "")) for each in arguments]
    rows += [(_option(each), each.help) for each in options if not each.hidden]
    if rows:
        yield from ("", "| | |", "|---|---|")
        yield from (f"| {what} | {_cell(text)} |" for what, text in rows)
    for word, child in children.items():
        if not child.hidden:
            yield from _command(child, [*words, word])


def _argument(argument: Parameter) -> str:
    name = str(argument.metavar or argument.name).upper()
    return name if argument.required else f"[{name}]"


def _option(option: Parameter) -> str:
    names = ", ".join(f"`{each}`" for each in (*option.opts, *option.secondary_opts))
    if option.is_flag or option.default is None or callable(option.default):
        return names
    return f"{names} ({option.default})"


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def python() -> str:
    """Describe the public names of the packages, from their docstrings."""
    lines = [
        "# Python API",
        "",
        "The public names of each package. Everything else is internal and may change.",
    ]
    for module, purpose in _MODULES.items():
        lines += ["", f"## `{module}`", "", purpose, "", "```{eval-rst}"]
        for value in _public(module):
            home = max((each for each in _MODULES if value.__module__.startswith(each)), key=len)
            if home == module:  # a name in two packages is described once
                lines += _described(value)
        lines.append("```")
    return "\n".join([*lines, ""])


def _described(value: Documented) -> Iterator[str]:
    kind = "class" if inspect.isclass(value) else "function"
    yield f".. auto{kind}:: {value.__module__}.{value.__qualname__}"
    if kind == "class":
        if any(base.__module__.startswith("chorister.analyst.") for base in value.__mro__[1:]):
            yield "   :inherited-members: ABC"
        yield from ("   :members:", "   :undoc-members:", "   :exclude-members: model_config")
    yield ""


def _public(module: str) -> list[Documented]:
    package = import_module(module)
    if hasattr(package, "__all__"):
        found = [getattr(package, name) for name in package.__all__]
    else:  # a module: all that it defines
        found = [each for _, each in inspect.getmembers(package)]
        found = [each for each in found if getattr(each, "__module__", "") == module]
    return [each for each in found if inspect.isclass(each) or inspect.isfunction(each)]


PAGES: Final = {"commands.md": commands, "python.md": python}


def write(folder: Path) -> None:
    """Write all pages; unchanged files keep their modification time."""
    for name, page in PAGES.items():
        path, text = folder / name, page()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
