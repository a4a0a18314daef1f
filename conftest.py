"""Run the code in README and docs with the tests.

Python blocks run as written, with one namespace per page. In `console` blocks each line that
begins with `$ chorister` is run, must succeed (unless it ends in `# exit N`), and must print the
lines below it; `...` matches anything.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

from sybil import Example, Sybil
from sybil.parsers.myst import CodeBlockParser, PythonCodeBlockParser

REPOSITORY = Path(__file__).parent


class ConsoleParser(CodeBlockParser):
    """Run the `chorister` commands of a page in the repository's folder."""

    language = "console"

    def evaluate(self, example: Example) -> str | None:
        """Return what went wrong, as Sybil expects."""
        block = textwrap.dedent(str(example.parsed))
        for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, expected = command.partition("\n")
            if line.startswith("chorister "):
                problem = _run(line, expected)
                if problem:
                    return problem
        return None


def _run(line: str, expected: str) -> str | None:
    line, _, comment = line.partition(" # exit ")
    program = Path(sys.executable).parent / "chorister"
    run = subprocess.run(
        [program, *shlex.split(line)[1:]],
        cwd=REPOSITORY,
        env=os.environ | {"COLUMNS": "100", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    printed = run.stdout + run.stderr
    if run.returncode != int(comment or 0):
        return f"{line}\nended with {run.returncode}:\n{printed}"
    squeezed = " ".join(expected.split())
    wanted = ".*".join(re.escape(part.strip()) for part in squeezed.split("..."))
    if not re.search(wanted, " ".join(printed.split()), flags=re.DOTALL):
        return f"{line}\nshould print\n{expected}\nbut printed\n{printed}"
    return None


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), ConsoleParser()],
    patterns=["README.md", "docs/**/*.md", "docs/*.md"],
).pytest()
