"""`tests/vectors/log`: a log to the byte, for other implementations and for this one's future.

Entries, policy and keys are stored; everything else in the folder is computed again and compared.
`python -m tests.transparency.test_vectors` writes the folder again.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from chorister.registry.server import publish_about
from chorister.transparency.auditor import audit, read_policies
from chorister.transparency.client import FolderSource
from chorister.transparency.cosigner import fetch_body
from chorister.transparency.entries import ListEntry, SignedEntry, Submission, parse_entry
from chorister.transparency.tiles import read_entries
from tests.logworld import (
    HELPER,
    LEADER,
    NOW,
    ORIGIN,
    World,
    end_entry,
    hpke_entry,
    policy_text,
    recipe_entry,
    revocation,
    submission,
)

VECTORS = Path(__file__).parent.parent / "vectors" / "log"


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "README.md"
    }


def rebuild(folder: Path, document: bytes, entries: list[Submission]) -> dict[str, bytes]:
    """The same entries through a registry and two cosigners, in the same three steps."""
    world = World(folder)
    for step in (entries[:3], entries[3:5], entries[5:]):
        for entry in step:
            world.registry.submit(entry.encode())
        world.publish()
    publish_about(world._log, ORIGIN, [document])
    return files(world.public)


def test_the_stored_log_verifies() -> None:
    source = FolderSource(VECTORS)
    found = audit(source, authority=read_policies(source).authority)
    assert found.time == NOW + 3
    assert found.checkpoint.size == len(found.entries) == 10


def test_the_stored_log_is_what_this_code_writes(tmp_path: Path) -> None:
    source = FolderSource(VECTORS)
    (digest,) = json.loads((VECTORS / "about.json").read_bytes())["policies"]
    document = (VECTORS / "policy" / f"{digest}.toml").read_bytes()
    entries = [
        Submission(data, fetch_body(source, parse_entry(data)))
        for data in read_entries(source, 0, 10)
        if not isinstance(parse_entry(data), ListEntry)
    ]
    assert rebuild(tmp_path, document, entries) == files(VECTORS)


def main() -> None:
    """Write the folder."""
    first = recipe_entry("first")
    entries: list[SignedEntry] = [
        hpke_entry(LEADER),
        hpke_entry(HELPER),
        first,
        recipe_entry("second", author="second author"),
        end_entry(first),
        recipe_entry("third", author="other author", analysis="keyboard.perplexity"),
        revocation("author", by="second author"),
    ]
    shutil.rmtree(VECTORS, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        written = rebuild(
            Path(folder), policy_text().encode(), [submission(entry) for entry in entries]
        )
    for name, data in written.items():
        path = VECTORS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


if __name__ == "__main__":
    main()
