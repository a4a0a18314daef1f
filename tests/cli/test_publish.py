"""`chorister recipe publish`, `end` and `revoke` against a registry on a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from typer.testing import CliRunner

from chorister.canonical import b64url_encode
from chorister.cli import app
from chorister.registry.server import publish_about
from chorister.transparency.auditor import audit
from chorister.transparency.entries import EndReason, RecipeEnd, RecipeEntry
from chorister.transparency.tree import leaf_hash
from tests.logworld import (
    ORIGIN,
    OTHER_ANALYSIS,
    World,
    authority,
    body_of,
    key,
    policy_text,
    public,
    recipe_entry,
    revocation,
)
from tests.registry.serving import serving

AUTHOR = b64url_encode(public("author"))


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["recipe", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def run_json(*arguments: object, code: int = 0) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(run(*arguments, "--json", code=code))
    return parsed


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    publish_about(world._log, ORIGIN, [policy_text().encode()])
    return world


@pytest.fixture
def url(world: World) -> Iterator[str]:
    with serving(world) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def jws(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.jws"
    write(path, recipe_entry("one"))
    return path


def write(path: Path, entry: RecipeEntry) -> None:
    """As `recipe sign` does: the recipe, and its entry for the log."""
    path.write_bytes(body_of(entry).jws + b"\n")
    path.with_name(f"{path.name}.entry").write_bytes(entry.encode())


def pem(folder: Path, name: str) -> Path:
    path = folder / f"{name}.pem"
    path.write_bytes(key(name).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return path


def test_publish_end_and_revoke(world: World, url: str, jws: Path, tmp_path: Path) -> None:
    address = leaf_hash(recipe_entry("one").encode()).hex()
    expected = {"ok": True, "index": 1, "address": address}
    assert run_json("publish", jws, "--registry", url) == expected
    # Again, in words: it stays where it is.
    assert "entry 1 of the log" in run("publish", jws, "--registry", url)
    author, second = pem(tmp_path, "author"), pem(tmp_path, "second author")
    reason = ("--reason", "target-reached")
    assert run_json("end", jws, "--key", author, "--registry", url, *reason)["index"] == 2
    revoked = run_json("revoke", "--author", AUTHOR, "--key", second, "--registry", url)
    entry = revocation("author", by="second author")
    assert revoked == {"ok": True, "index": 3, "address": leaf_hash(entry.encode()).hex()}
    world.clock.advance(1000)
    world.publish()
    found = audit(world.source, authority=authority())
    assert [logged.index for logged in found.entries] == [0, 1, 2, 3, 4]
    end = found.entries[2].entry
    assert isinstance(end, RecipeEnd)
    assert end.reason is EndReason.TARGET_REACHED


def test_what_the_registry_refuses(world: World, url: str, jws: Path, tmp_path: Path) -> None:
    author, stranger = pem(tmp_path, "author"), pem(tmp_path, "stranger")
    # Not logged, so there is nothing to end.
    assert "refused" in run("end", jws, "--key", author, "--registry", url, code=1)
    strangers = ("--author", AUTHOR, "--key", stranger, "--registry", url)
    refused = run_json("revoke", *strangers, code=1)
    assert (refused["ok"], "can revoke a key" in refused["why"]) == (False, True)
    # A key that is listed, for another analysis.
    write(jws, recipe_entry("two", author="other author"))
    assert "lists key" in run_json("publish", jws, "--registry", url, code=1)["why"]
    write(jws, recipe_entry("two", author="other author", analysis=OTHER_ANALYSIS))
    assert run_json("publish", jws, "--registry", url)["ok"]
    assert world.registry.status().size == 2


def test_publish_without_the_entry_file_needs_the_key(
    world: World, url: str, jws: Path, tmp_path: Path
) -> None:
    file = jws.with_name(f"{jws.name}.entry")
    file.write_bytes(recipe_entry("two").encode())
    assert "not the body" in run("publish", jws, "--registry", url, code=2)
    file.unlink()
    assert "pass --key" in run("publish", jws, "--registry", url, code=2)
    assert world.registry.status().size == 1
    author = pem(tmp_path, "author")
    assert run_json("publish", jws, "--registry", url, "--key", author)["ok"]
    assert world.registry.status().size == 2


def test_wrong_input(jws: Path, tmp_path: Path) -> None:
    """Exit code 2, before or instead of reaching a registry."""
    nowhere = ("--registry", "http://127.0.0.1:1")
    author = pem(tmp_path, "author")
    run("publish", jws, *nowhere, code=2)
    assert "can't be reached" in run("end", jws, "--key", author, *nowhere, code=2)
    assert "--author" in run("revoke", "--author", "???", "--key", author, *nowhere, code=2)
    assert "32 bytes" in run("revoke", "--author", "AAAA", "--key", author, *nowhere, code=2)
    jws.write_bytes(b"noise")
    run("publish", jws, *nowhere, code=2)
    assert "can't read" in run("end", tmp_path / "none", "--key", author, *nowhere, code=2)


def test_a_signature_that_does_not_verify_is_not_sent(world: World, url: str, jws: Path) -> None:
    head, payload, signature = body_of(recipe_entry("one")).jws.split(b".")
    other = body_of(recipe_entry("two")).jws.split(b".")[2]
    assert other != signature
    jws.write_bytes(b".".join((head, payload, other)))
    run("publish", jws, "--registry", url, code=2)
    assert world.registry.status().size == 1
