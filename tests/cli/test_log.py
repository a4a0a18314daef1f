"""`chorister log` on folders that a registry wrote, whole and damaged."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from chorister.canonical import b64url_encode
from chorister.cli import app
from chorister.clock import SettableClock
from chorister.errors import WrongList
from chorister.policy.values import visible
from chorister.policy.witnesses import parse_witness_policy
from chorister.registry.server import RegistryConfig, publish_about
from chorister.transparency.checkpoint import MAX_SKEW, SignedCheckpoint
from chorister.transparency.entries import ListEntry, RecipeEntry
from chorister.transparency.monitor import LogMonitor
from chorister.transparency.tree import verify_inclusion
from tests.certificates import a_certificate
from tests.device.loopback import Reply, Seen, serve
from tests.logworld import (
    ANALYSIS,
    DAY,
    HELPER_NAME,
    LEADER,
    LEADER_NAME,
    LOG_VKEY,
    NOW,
    ORIGIN,
    OTHER_ANALYSIS,
    World,
    a_world,
    authority,
    end_entry,
    forge,
    hpke_entry,
    identity,
    key,
    policy_text,
    public,
    recipe_entry,
    revocation,
    vkey,
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


def test_a_reader_who_has_seen_enough_is_no_bug(world: World) -> None:
    """As in `chorister log show URL --json | head`."""
    with subprocess.Popen(
        [sys.executable, "-m", "chorister.cli", "log", "show", str(world.public), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdout.close()
        assert b"bug" not in command.stderr.read()
    assert command.returncode == 1


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


# --- For standard tools --------------------------------------------------------------------------


def test_a_policy_for_standard_tools(tmp_path: Path) -> None:
    """With two keys of one aggregator, one of which suffices, and a quorum of further witnesses."""
    file = tmp_path / "policy.toml"
    leader, second = b64url_encode(public("leader")), b64url_encode(public("second leader"))
    text = policy_text().replace(f'"{leader}"', f'"{leader}", "{second}"')
    witnesses = [f"  witness w{n} {vkey(f'witness.example/{n}', f'w{n}')}" for n in range(3)]
    witnesses += ["# two of them", "group further 2 w0 w1 w2", "quorum further"]
    lines = "\n".join(witnesses)
    file.write_text(text.replace("[log]\n", f"[log]\nwitnesses = '''\n{lines}\n'''\n"))
    first, *rest = run("policy", file).splitlines()
    assert first == f"log {LOG_VKEY}"
    found = parse_witness_policy("\n".join(rest))
    named = {each.name: name for name, each in found.witnesses.items()}
    assert {LEADER_NAME, HELPER_NAME, "witness.example/0"} < set(named)
    keys = {found.witnesses[name].key: name for name in found.witnesses}
    helper = keys[public("helper")]
    for one in ("leader", "second leader"):
        assert found.satisfied({keys[public(one)], helper, "w0", "w2"})
        assert not found.satisfied({keys[public(one)], helper, "w0"})
        assert not found.satisfied({keys[public(one)], "w0", "w1", "w2"})
    assert not found.satisfied({helper, "w0", "w1", "w2"})
    file.write_text(policy_text())
    plain = parse_witness_policy("\n".join(run("policy", file).splitlines()[1:]))
    assert plain.satisfied({LEADER_NAME, HELPER_NAME})
    assert not plain.satisfied({LEADER_NAME})


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


def test_a_fork_leaves_proof_that_can_be_passed_on(watched: World, tmp_path: Path) -> None:
    """Both checkpoints, signed by the log: in what is printed and in what the webhook gets."""
    kept = tmp_path / "kept"
    watch(watched, "--kept", kept)
    other = [recipe_entry(f"r{number}").encode() for number in range(9)]
    time = watched.clock.now() + 1
    forge(watched.public, other, time=time, cosigned=True, name="checkpoint")
    posted: list[bytes] = []

    def answer(request: Seen) -> Reply:
        posted.append(request.body)
        return Reply(status=200 if len(posted) == 1 else 500)

    with serve(answer) as hook:
        (wrong,) = watch(watched, "--kept", kept, "--webhook", hook.url, code=1)
        assert json.loads(posted[0]) == {"kind": "alarm", **wrong}
        # A webhook that is away hides nothing.
        text = run(
            "monitor", watched.public, "--once", "--kept", kept, "--webhook", hook.url, code=1
        )
    assert "wrong (LogForked)" in text
    for evidence in wrong["evidence"]:
        SignedCheckpoint.parse(evidence.encode()).check_log(ORIGIN, [public("log")])
        assert all(line in text for line in evidence.splitlines())
    assert len(set(wrong["evidence"])) == 2
    since = run_json("verify", watched.public, "--since", kept, code=1)
    assert since["evidence"][0] == kept.read_text()


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
    with serve(lambda _: Reply(status=503)) as failing:
        broken = ("--kept", kept, "--webhook", failing.url)
        assert "503" in run("monitor", watched.public, "--once", *broken, code=1)
    assert not kept.exists()
    assert watch(watched, "--kept", kept) == rows


def test_monitor_tells_a_question_in_words(watched: World) -> None:
    rows = {row["index"]: row for row in watch(watched) if row["kind"] == "recipe"}
    question, answering, cost = rows[2]["question"]
    assert question["title"] == "Question first"
    assert any("the device runs: SELECT" in line for line in question["lines"])
    assert any("devices or more have answered" in line for line in answering["lines"])
    assert any("epsilon" in line for line in cost["lines"])
    text = run("monitor", watched.public, "--once")
    for line in (*question["lines"], *answering["lines"], *cost["lines"]):
        assert f"- {visible(line)}" in text


def test_monitor_goes_on_while_its_webhook_is_away(
    watched: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each entry is printed once, and posted until it arrives; only then is it known as told."""
    kept, posted, slept = tmp_path / "kept", list[int](), list[int]()

    def answer(request: Seen) -> Reply:
        posted.append(json.loads(request.body)["index"])
        return Reply(status=503 if len(posted) in (2, 3) else 200)

    def sleep(seconds: int) -> None:
        slept.append(seconds)
        assert kept.exists() == (len(slept) > 2)
        if len(slept) > 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("chorister.cli.log_monitor.time", SimpleNamespace(sleep=sleep))
    with serve(answer) as hook:
        options = ("--kept", kept, "--webhook", hook.url, "--every", 7, "--json")
        result = CliRunner().invoke(app, ["log", "monitor", *map(str, (watched.public, *options))])
    assert result.exit_code == 130
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    told = [row["index"] for row in rows]
    assert told == [row["index"] for row in watch(watched)]
    assert posted == [told[0], told[1], told[1], *told[1:]]
    assert slept == [7] * 4


def test_monitor_takes_earlier_policies(watched: World, tmp_path: Path) -> None:
    old, new = tmp_path / "old.toml", tmp_path / "new.toml"
    old.write_text(policy_text())
    author, following = b64url_encode(public("author")), b64url_encode(public("next"))
    new.write_text(policy_text().replace(author, following))
    assert watch(watched, "--policy", new, code=1)[0]["wrong"] == "NotAuthorized"
    assert watch(watched, "--policy", new, "--earlier-policy", old)
    words = run("monitor", watched.public, "--once", "--earlier-policy", old, code=2)
    assert "needs --policy" in words


def test_monitor_reports_what_it_read_at_a_look_that_failed(world: World) -> None:
    """A log that shows a question under a bad list, and then a good one, hides nothing."""
    monitor = LogMonitor(world.source, authority=authority(), clock=world.clock)
    monitor.fetch_new()
    world.publish(recipe_entry("third", author="second author", closes=NOW + DAY))
    world.clock.set(NOW + DAY + 2 * MAX_SKEW)
    tree = world.checkpoint().checkpoint
    stale = tree.sign(key("log"))
    for side in ("leader", "helper"):
        stale = stale.with_cosigner(identity(side).sign(tree, world.clock.now()))
    (world.public / "checkpoint").write_bytes(stale.encode())
    with pytest.raises(WrongList, match="out of date"):
        monitor.fetch_new()
    world.publish()
    kinds = [type(logged.entry) for logged in monitor.fetch_new()]
    assert kinds == [RecipeEntry, ListEntry, ListEntry]
