"""`chorister log` on folders that a registry wrote, whole and damaged."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chorister.canonical import b64url_encode
from chorister.cli import app
from chorister.clock import SettableClock
from chorister.registry.server import RegistryConfig, publish_about
from chorister.transparency.tree import verify_inclusion
from tests.certificates import a_certificate
from tests.device.loopback import Reply, Seen, serve
from tests.logworld import (
    ANALYSIS,
    DAY,
    HELPER_NAME,
    LEADER,
    LEADER_NAME,
    NOW,
    ORIGIN,
    OTHER_ANALYSIS,
    World,
    a_world,
    end_entry,
    forge,
    hpke_entry,
    policy_text,
    public,
    recipe_entry,
    revocation,
)


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["log", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def run_json(*arguments: object, code: int = 0) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(run(*arguments, "--json", code=code))
    return parsed


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = a_world(tmp_path)
    world.publish(end_entry(recipe_entry("first")), revocation("author", by="log"))
    publish_about(world._log, ORIGIN, [policy_text().encode()])
    return world


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    path = tmp_path / "policy.toml"
    path.write_text(policy_text())
    return path


def test_verify_a_folder_that_a_registry_wrote(world: World, policy_file: Path) -> None:
    for folder in (world.folder, world.public):
        text = run("verify", folder)
        assert "everything verified" in text
        assert "9 entries at 2026-11-16" in text
        assert "pass --policy" in text
    assert "pass --policy" not in run("verify", world.public, "--policy", policy_file)
    found = run_json("verify", world.public, "--policy", policy_file)
    assert found == {
        "ok": True,
        "origin": ORIGIN,
        "size": 9,
        "root": world.checkpoint().checkpoint.root.hex(),
        "time": NOW + 3,
        "list": world.proof().entry.digest.hex(),
        "list_time": NOW + 3,
        "keys_from": "policy",
        "cosigned_by": [HELPER_NAME, LEADER_NAME],
        "recipes": 2,
        "open_recipes": 0,
        "ended": 1,
        "revoked_keys": 1,
        "hpke_configs": 2,
        "unjudged": 0,
        "candidate": None,
    }


def test_verify_shows_who_is_waited_for(world: World) -> None:
    world.submit(hpke_entry(LEADER, b"next"))
    world.clock.advance(1)
    world.registry.issue()
    assert f"11 entries, waiting for {HELPER_NAME}, {LEADER_NAME}" in run("verify", world.public)


def test_verify_names_the_first_wrong_thing(world: World, policy_file: Path) -> None:
    entry = recipe_entry("second")
    path = world.public / "body" / entry.body_digest.hex()
    path.write_bytes(path.read_bytes()[:-1])
    assert "wrong (LogWithheld)" in run("verify", world.public, code=1)
    wrong = run_json("verify", world.public, "--policy", policy_file, code=1)
    assert (wrong["ok"], wrong["wrong"]) == (False, "LogWithheld")
    assert entry.body_digest.hex() in wrong["why"]


def test_verify_since_a_kept_checkpoint(world: World, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_bytes((world.public / "checkpoint").read_bytes())
    world.leader.configs.add(b"second")
    world.publish(hpke_entry(LEADER, b"second", not_after=2**40))
    assert "everything verified" in run("verify", world.public, "--since", kept)
    other = [recipe_entry(f"r{number}").encode() for number in range(9)]
    time = world.clock.now() + 1
    forge(world.public, other, time=time, cosigned=True, name="checkpoint")
    (world.public / "candidate").unlink()
    assert run_json("verify", world.public)["ok"]
    assert run_json("verify", world.public, "--since", kept, code=1)["wrong"] == "LogForked"


def test_verify_wants_a_fresh_checkpoint_when_told(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy may be old, a live log may not."""
    clock = SettableClock(NOW + 3 * DAY)
    monkeypatch.setattr("chorister.cli.log.SystemClock", lambda: clock)
    assert run_json("verify", world.public, "--fresh", code=1)["wrong"] == "CheckpointTime"
    assert run_json("verify", world.public, "--no-fresh")["ok"]
    clock.set(NOW + 10)
    assert run_json("verify", world.public, "--fresh")["ok"]


def test_verify_under_anothers_policy(world: World, tmp_path: Path) -> None:
    text = policy_text().replace("[log]\nkeys = [", '[log]\nkeys = ["' + "A" * 43 + '"] # ')
    (tmp_path / "other.toml").write_text(text)
    wrong = run_json("verify", world.public, "--policy", tmp_path / "other.toml", code=1)
    assert wrong["wrong"] == "LogSignatureInvalid"


@pytest.mark.parametrize(
    "about",
    [
        b"",
        b"[]",
        b"{}",
        b'{"policies": [1], "earlier_policies": []}',
        b'{"policies": [], "earlier_policies": []}',
    ],
)
def test_verify_without_usable_policies(world: World, about: bytes) -> None:
    (world.public / "about.json").write_bytes(about)
    assert "wrong" in run("verify", world.public, code=1)


def test_verify_nothing(tmp_path: Path) -> None:
    assert run_json("verify", tmp_path, code=1)["wrong"] == "LogWithheld"
    assert "neither a" in run("verify", tmp_path / "missing", code=2)
    assert "can't read" in run("verify", tmp_path, "--since", tmp_path / "missing", code=2)


def test_show_lists_entries_in_words(world: World) -> None:
    text = run("show", world.public)
    for word in ("recipe", "end", "revocation", "hpke config", "withdrawn", "current"):
        assert word in text
    rows = run_json("show", world.public)["entries"]
    assert [row["kind"] for row in rows] == [
        "hpke config",
        "hpke config",
        "recipe",
        "list",
        "recipe",
        "list",
        "end",
        "revocation",
        "list",
    ]
    assert [row["current"] for row in rows] == [True, True, *[False] * 7]


def test_show_one_entry_with_its_proof(world: World) -> None:
    shown = run_json("show", world.public, "--entry", 3)
    verify_inclusion(
        leaf=bytes.fromhex(shown["address"]),
        index=3,
        size=shown["size"],
        proof=[bytes.fromhex(node) for node in shown["proof"]],
        root=world.checkpoint().checkpoint.root,
    )
    assert "proof" in run("show", world.public, "--entry", 0)
    assert "choose one of 0 to 8" in run("show", world.public, "--entry", 9, code=2)


def test_show_what_cannot_be_read(world: World) -> None:
    (world.public / "tile/entries/000.p/9").unlink()
    assert "LogWithheld" in run("show", world.public, code=1)


def test_settings_have_defaults(tmp_path: Path) -> None:
    path = tmp_path / "registry.toml"
    path.write_text('origin = "a"\nfolder = "log"\nkey = "k"\npolicies = ["p"]\n')
    config = RegistryConfig.load(path)
    assert (config.interval, config.folder) == (60, str(tmp_path / "log"))


def test_policies_change_and_old_entries_stay_good(world: World, tmp_path: Path) -> None:
    """A key that was replaced in the policy vouched for entries of its day."""
    old, new = tmp_path / "old.toml", tmp_path / "new.toml"
    old.write_text(policy_text())
    text = policy_text().replace(b64url_encode(public("author")), b64url_encode(public("next")))
    new.write_text(text)
    assert run_json("verify", world.public, "--policy", new, code=1)["wrong"] == "NotAuthorized"
    assert run_json("verify", world.public, "--policy", new, "--earlier-policy", old)["ok"]
    assert "needs --policy" in run("verify", world.public, "--earlier-policy", old, code=2)
    publish_about(world._log, ORIGIN, [text.encode()])
    assert run_json("verify", world.public)["ok"]
    # Forgotten by a later start: never.
    publish_about(world._log, ORIGIN, [text.encode()])
    about = json.loads((world.public / "about.json").read_bytes())
    assert (len(about["policies"]), len(about["earlier_policies"])) == (1, 1)


def test_entries_of_others_policies_are_counted(world: World, tmp_path: Path) -> None:
    """A log may serve policies that the auditor does not have."""
    mine = tmp_path / "mine.toml"
    start = policy_text().index(f'[analyses."{ANALYSIS}"]')
    end = policy_text().index(f'[analyses."{OTHER_ANALYSIS}"]')
    mine.write_text(policy_text()[:start] + policy_text()[end:])
    found = run_json("verify", world.public, "--policy", mine)
    assert (found["ok"], found["unjudged"]) == (True, 3)
    assert "do not cover" in run("verify", world.public, "--policy", mine)


def test_authorities_of_one_s_own(world: World, tmp_path: Path) -> None:
    key, chain = a_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)

    def answer(request: Seen) -> Reply:
        file = world.public / request.path.lstrip("/")
        return Reply(body=file.read_bytes()) if file.is_file() else Reply(status=404)

    with serve(answer, tls=context) as registry:
        run("verify", registry.url, "--no-fresh", "--ca-bundle", chain)
        assert "0" in run("show", registry.url, "--ca-bundle", chain)
        run("verify", registry.url, "--no-fresh", code=1)


# --- Monitoring ----------------------------------------------------------------------------------


def watch(world: World, *options: object, code: int = 0) -> list[dict[str, Any]]:
    text = run("monitor", world.public, "--once", "--json", *options, code=code)
    return [json.loads(line) for line in text.splitlines()] if code == 0 else [json.loads(text)]


@pytest.fixture
def watched(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr("chorister.cli.log_monitor.SystemClock", lambda: world.clock)
    return world


def test_monitor_tells_each_new_entry_once(watched: World, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    rows = watch(watched, "--kept", kept)
    assert [row["kind"] for row in rows].count("recipe") == 2
    assert watch(watched, "--kept", kept) == []
    watched.publish(recipe_entry("third", author="second author"))
    (row,) = watch(watched, "--kept", kept)
    assert (row["kind"], "third of" in row["what"]) == ("recipe", True)
    assert "third of" in run("monitor", watched.public, "--once")


def test_monitor_notices_a_fork_between_two_looks(watched: World, tmp_path: Path) -> None:
    """Even if both aggregators sign it: the kept checkpoint is enough."""
    kept = tmp_path / "kept"
    watch(watched, "--kept", kept)
    before = kept.read_bytes()
    other = [recipe_entry(f"r{number}").encode() for number in range(9)]
    time = watched.clock.now() + 1
    forge(watched.public, other, time=time, cosigned=True, name="checkpoint")
    (wrong,) = watch(watched, "--kept", kept, code=1)
    assert wrong["wrong"] == "LogForked"
    assert kept.read_bytes() == before
    kept.write_bytes(b"noise")
    assert watch(watched, "--kept", kept, code=1)[0]["wrong"] == "StorageDamaged"


def test_monitor_notices_a_stale_log(watched: World) -> None:
    watched.clock.advance(3 * DAY)
    assert watch(watched, code=1)[0]["wrong"] == "CheckpointTime"


def test_monitor_posts_to_a_webhook(watched: World, tmp_path: Path) -> None:
    seen: list[bytes] = []

    def answer(request: Seen) -> Reply:
        seen.append(request.body)
        return Reply(body=b"")

    with serve(answer) as hook:
        rows = watch(watched, "--webhook", hook.url)
    assert [json.loads(body) for body in seen] == rows
    # One that is away loses nothing: the entries are told again.
    kept = tmp_path / "kept"
    away = ("--kept", kept, "--webhook", "http://127.0.0.1:1")
    assert "webhook" in run("monitor", watched.public, "--once", *away, code=1)
    assert not kept.exists()
