"""The `chorister` command: one Typer application, one module a group of commands.

Exit codes: 0 done; 1 a check said no (a refused recipe, a policy that contradicts itself);
2 the command line or an input was wrong; 3 a bug in Chorister.
"""

from __future__ import annotations

import sys
import traceback
from typing import Annotated, Any, Final, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from chorister import __version__
from chorister.errors import ChoristerError, InternalError

__all__ = ["OPERATORS", "QUESTIONS", "ROLES", "START", "app", "console"]

console = Console()

# The chapters of `chorister --help`.
START: Final = "Begin here: everything on this machine"
ROLES: Final = "Take part: run a device or a server"
QUESTIONS: Final = "Questions: what may be asked, and what it costs"
OPERATORS: Final = "For operators and auditors"
_CHAPTERS: Final = (START, QUESTIONS, ROLES, OPERATORS)


class _Group(TyperGroup):
    """Turns an error into one line and an exit code; a bug shows its traceback above the line."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401 (the signature is Click's)
        """Chapter by chapter, as `--help` shows them."""
        names = super().list_commands(ctx)
        panels = {name: getattr(self.commands[name], "rich_help_panel", None) for name in names}
        places = {chapter: place for place, chapter in enumerate(_CHAPTERS)}
        return sorted(names, key=lambda name: places.get(str(panels[name]), len(places)))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 (Click's)
        """Options before the first command."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            _end(error)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 (the signature is Click's)
        """The command, with its own options."""
        try:
            return super().invoke(ctx)
        except ChoristerError as error:
            if isinstance(error, InternalError):
                traceback.print_exc()
            _fail(str(error), 3 if isinstance(error, InternalError) else 2)
        except Exception as error:
            _end(error)


def _end(error: Exception) -> NoReturn:
    """Of what is no error of ours: wrong options, the end of a command, or a bug."""
    kind = type(error)
    if kind.__module__.partition(".")[0] not in {"click", "typer"}:
        traceback.print_exc()
        _fail(f"a bug in Chorister, please report it: {error!r}", 3)
    told: Any = error
    context = getattr(told, "ctx", None)
    if context is None or kind.__name__ == "NoArgsIsHelpError":
        raise error
    message = str(told.format_message()).rstrip(".")
    _fail(f"{message}; see `{context.command_path} --help`", int(told.exit_code))


def _fail(message: str, code: int) -> NoReturn:
    # Paths and names stay whole, to be copied.
    line = f"[bold red]error:[/] {escape(message)}"
    Console(stderr=True).print(line, highlight=False, soft_wrap=True)
    sys.exit(code)


app = typer.Typer(
    name="chorister",
    cls=_Group,
    no_args_is_help=True,
    invoke_without_command=True,
    rich_markup_mode="markdown",
)


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Private federated statistics: you hear the choir, never a chorister."""
    if version:
        print(__version__)
        raise typer.Exit


# Each module adds its commands to `app`.
from chorister.cli import (  # noqa: E402, F401
    demo,
    device,
    doctor,
    keygen,
    keys,
    log,
    policy,
    privacy,
    publish,
    recipe,
    serve,
    serve_console,
    tasks,
    up,
    worker,
)
