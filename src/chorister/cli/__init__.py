"""The `chorister` command: one Typer application, with one module per group of commands.

Exit codes: 0 done; 1 a check failed (a refused recipe, a policy that contradicts itself);
2 the command line or an input was wrong; 3 a bug in Chorister.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn, TypeAlias

try:
    import numpy  # noqa: F401 (planning needs it)
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text
    from typer.core import TyperGroup
except ModuleNotFoundError as error:
    sys.exit(
        f"error: the command line needs more packages ({error.name}): pip install 'chorister[cli]'"
    )

from chorister import __version__
from chorister.errors import ChoristerError, InternalError, InvalidInput, ServiceError

if os.environ.get("COLUMNS") == "0":
    del os.environ["COLUMNS"]  # the width is unknown; Rich would print nothing in 0 columns


class PlainConsole(Console):
    """Prints strangers' text as it is spelled: nothing hidden, no escape codes, no emoji codes."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:  # noqa: ANN401 (Rich's own)
        from chorister.policy.values import legible  # only what prints has to load it

        return super().render_str(legible(text), **options)


console = PlainConsole()

JSON: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
CABundle: TypeAlias = Annotated[
    Path | None,
    typer.Option("--ca-bundle", help="Trust only the certificate authorities in this PEM file."),
]

# The sections of `chorister --help`.
START: Final = "Start here: everything on this machine"
ROLES: Final = "Take part: run a device or a server"
QUESTIONS: Final = "Questions: what may be asked, and what it costs"
OPERATORS: Final = "For operators and auditors"
_SECTIONS: Final = (START, QUESTIONS, ROLES, OPERATORS)
_NOT_WRITABLE: Final = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
"""Errors of the disk, which any command may meet when it writes: not bugs."""


class _Group(TyperGroup):
    """Turns an error into one line and an exit code, with a traceback if it is a bug."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401 (the signature is Click's)
        """Sort commands by section, as `--help` shows them."""
        names = super().list_commands(ctx)
        panels = {name: getattr(self.commands[name], "rich_help_panel", None) for name in names}
        places = {section: place for place, section in enumerate(_SECTIONS)}
        return sorted(names, key=lambda name: places.get(str(panels[name]), len(places)))

    def main(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 (the signature is Click's)
        """Spell out what the terminal's character set lacks: it may be neither UTF-8 nor ours."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
                stream.reconfigure(errors="backslashreplace")
        return super().main(*args, **options)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 (Click's)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            _end(error)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 (the signature is Click's)
        try:
            return super().invoke(ctx)
        except ChoristerError as error:
            if isinstance(error, InternalError):
                traceback.print_exc()
            _fail(str(error), 3 if isinstance(error, InternalError) else 2)
        except Exception as error:
            _end(error)


def _end(error: Exception) -> NoReturn:
    """Handle an exception that is not ours: wrong options, the end of a command, or a bug."""
    kind = type(error)
    if isinstance(error, BrokenPipeError):
        raise error  # whoever reads the output has seen enough: Typer ends the command quietly
    if isinstance(error, OSError) and error.errno in _NOT_WRITABLE:
        _fail(f"can't write {error.filename or 'the output'}: {error.strerror}", 2)
    if kind.__module__.partition(".")[0] not in {"click", "typer"}:
        traceback.print_exc()
        _fail(f"a bug in Chorister, please report it: {error!r}", 3)
    raised: Any = error
    context = getattr(raised, "ctx", None)
    if context is None or kind.__name__ == "NoArgsIsHelpError":
        raise error
    message = str(raised.format_message()).rstrip(".")
    _fail(f"{message}; see `{context.command_path} --help`", int(raised.exit_code))


def _fail(message: str, code: int) -> NoReturn:
    # Without line breaks, so that paths and names can be copied.
    line = f"[bold red]error:[/] {escape(message)}"
    PlainConsole(stderr=True).print(line, soft_wrap=True)
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
    """Learn from a fleet of devices without collecting anyone's data."""
    if version:
        print(__version__)
        raise typer.Exit


def say(text: str) -> None:
    """Print a line as it is: without markup and line breaks, so that it can be copied."""
    console.print(text, markup=False, soft_wrap=True)


def print_table(
    titles: Sequence[str], rows: Iterable[Sequence[object]], *, to: Console | None = None
) -> None:
    """Print a table; where it is wider than the terminal, one block per row.

    A name that is folded into pieces can be neither read nor copied.
    """
    target = to or console
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    if sum(widths) + 3 * len(widths) <= target.width:
        table = Table(*titles, show_edge=False)
        for row in cells:
            table.add_row(*map(escape, row))
        target.print(table)
        return
    for row in cells:
        target.print(row[0], markup=False, soft_wrap=True)
        for title, cell in zip(titles[1:], row[1:], strict=True):
            target.print(f"  {title}: {cell}", markup=False, soft_wrap=True)


def print_json(value: object) -> None:
    typer.echo(json.dumps(value))  # in ASCII, for every terminal and pipe


@contextlib.contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Name the extra to install if an import in this block fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ServiceError(
            f"this command needs more packages ({error.name}): pip install 'chorister[{extra}]'"
        ) from error


def read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"can't read {path}: {error.strerror}") from None


# Each module adds its commands to `app`.
from chorister.cli import (  # noqa: E402, F401
    demo,
    device,
    log,
    log_monitor,
    operators,
    policy,
    privacy,
    recipe,
    results,
    serve,
    up,
)
