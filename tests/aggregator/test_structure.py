"""What each package of the aggregator may know."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import chorister.aggregator

SOURCE = Path(str(chorister.aggregator.__file__)).parent
MODULES = sorted(SOURCE.rglob("*.py"))
SQL = {"sqlalchemy", "alembic", "sqlite3", "psycopg"}
METHODS = {"execute", "executemany", "executescript", "exec_driver_sql", "scalar", "scalars"}


def imported(tree: ast.AST) -> Iterator[str]:
    """The packages that a module imports, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name.split(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module.split(".")[0]


def called(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.func.attr


def in_storage(path: Path) -> bool:
    return path.relative_to(SOURCE).parts[0] == "storage"


@pytest.mark.parametrize(
    "path", [each for each in MODULES if not in_storage(each)], ids=lambda path: path.stem
)
def test_only_storage_knows_sql(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not SQL & set(imported(tree))
    assert not METHODS & set(called(tree))


def test_storage_does_know_sql() -> None:
    """The check above would find it."""
    found = [ast.parse(each.read_text()) for each in MODULES if in_storage(each)]
    assert {"sqlalchemy", "alembic", "sqlite3"} <= {
        name for each in found for name in imported(each)
    }
    assert {"execute", "exec_driver_sql"} <= {name for each in found for name in called(each)}


def test_a_server_without_workers_does_not_load_the_job_queue() -> None:
    """Procrastinate takes longer to import than the rest of a server."""
    for path in MODULES:
        if path.name not in ("job_queue.py", "worker.py"):
            top = ast.Module(
                [node for node in ast.parse(path.read_text()).body if not isinstance(node, ast.If)],
                type_ignores=[],
            )
            direct = [
                node.module
                for node in top.body
                if isinstance(node, ast.ImportFrom) and node.module is not None
            ]
            assert not any(name.endswith((".job_queue", ".worker")) for name in direct), path
            assert not any(name.startswith("procrastinate") for name in direct), path
