"""One meaning per noun, one HTTP client, one place for what a package exports."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "chorister"

IDIOMATIC = {"__init__.py", "app.py", "config.py", "database.py", "model.py", "server.py"}
"""Names that say what a module is to its package, in as many packages as have one."""
ALSO = {
    "device.py",  # the package's main class, and the commands about it
    "schema.py",  # the tables of an aggregator's database, and of a device's
}


def test_no_two_modules_have_the_same_name() -> None:
    names = Counter(path.name for path in SOURCE.rglob("*.py"))
    assert len(names) > 200
    assert {name for name, count in names.items() if count > 1} <= IDIOMATIC | ALSO


def test_no_two_classes_have_the_same_name() -> None:
    names = Counter(
        node.name
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert len(names) > 300
    assert [name for name, count in names.items() if count > 1] == []


def test_only_packages_say_what_they_export() -> None:
    outside = [path for path in SOURCE.rglob("*.py") if path.name != "__init__.py"]
    assert [path for path in outside if "__all__" in path.read_text(encoding="utf-8")] == []


def test_there_is_one_http_client() -> None:
    """What sends requests has a deadline, a limit, and nothing to recognize the sender by."""
    senders = re.compile(
        r"httpx2?\.(Client|AsyncClient|get|post|put|request|stream)\b|urlopen|HTTPS?Connection\("
        r"|httpcore2?\.ConnectionPool|create_connection\("
    )
    found = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if senders.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"http_network.py"}
