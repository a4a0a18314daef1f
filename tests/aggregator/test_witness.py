"""An aggregator that is asked as a witness is: c2sp.org/tlog-witness, answer by answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from chorister.clock import SettableClock
from chorister.registry.registry import CANDIDATE_LIFETIME
from chorister.transparency.checkpoint import Checkpoint, SignedCheckpoint
from chorister.transparency.note import key_name, parse_lines
from chorister.transparency.tiles import bundle_path
from chorister.transparency.tree import consistency_proof
from chorister.transparency.witness import SIZE_TYPE, WitnessRequest, origin_hash
from tests.aggregator.inprocess_pair import InProcessPair, an_idle_pair
from tests.logworld import NOW, ORIGIN, key, public, submission


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[InProcessPair]:
    with an_idle_pair(tmp_path) as pair:
        yield pair


def ask(pair: InProcessPair, request: WitnessRequest | bytes) -> tuple[int, str, bytes]:
    data = request if isinstance(request, bytes) else request.encode()
    answer = pair.request("POST", f"{pair.operators.at.leader}add-checkpoint", body=data)
    return answer.status_code, answer.headers["content-type"], answer.content


def candidate(pair: InProcessPair, name: str) -> SignedCheckpoint:
    """The log's next checkpoint, with one more question."""
    assert isinstance(pair.clock, SettableClock)
    entry = pair.operators.entry(pair.operators.recipe(name, NOW))
    pair.registry.submit(submission(entry).encode())
    pair.clock.advance(CANDIDATE_LIFETIME)
    return pair.registry.issue()


def request(pair: InProcessPair, signed: SignedCheckpoint) -> WitnessRequest:
    """With the proof from what the leader cosigned last."""
    assert pair.leader.cosigning is not None
    last = pair.leader.cosigning.last.size
    return WitnessRequest(last, pair.registry.to_witness(last)[1], signed)


def test_it_cosigns_what_extends_its_log_and_remembers_it(pair: InProcessPair) -> None:
    at = pair.operators.at.leader
    newest = f"{at}{origin_hash(ORIGIN)}/checkpoint"
    for name in ("one", "two", "two"):
        signed = candidate(pair, name)
        asked = request(pair, signed)
        status, _, body = ask(pair, asked)
        assert status == 200, body
        (line,) = parse_lines(body.decode())
        signed.with_cosigner(line).note.check_cosignature(key_name(at), [public("leader")])
        served = SignedCheckpoint.parse(pair.request("GET", newest).content)
        assert served.checkpoint == signed.checkpoint
        served.note.check_cosignature(key_name(at), [public("leader")])
        served.check_log(ORIGIN, [public("log")])
    assert pair.request("GET", f"{at}{origin_hash('other')}/checkpoint").status_code == 404


def test_it_names_its_size_if_the_request_starts_elsewhere(pair: InProcessPair) -> None:
    signed = candidate(pair, "one")
    asked = request(pair, signed)
    size = asked.old_size
    wrong = asked._replace(old_size=size + 1, proof=())
    assert ask(pair, wrong) == (409, SIZE_TYPE, f"{size}\n".encode())


def test_it_names_its_size_if_a_larger_log_was_cosigned_meanwhile(
    pair: InProcessPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """422 would mean a fork, and raise an alarm."""
    asked = request(pair, candidate(pair, "one"))
    larger = candidate(pair, "two")

    def meanwhile(*_: object) -> None:
        assert pair.leader.cosigning is not None
        pair.leader.cosigning.cosign(larger)

    monkeypatch.setattr("chorister.aggregator.http.witness_routes.check_request", meanwhile)
    assert ask(pair, asked) == (409, SIZE_TYPE, f"{larger.checkpoint.size}\n".encode())


def test_its_refusals(pair: InProcessPair) -> None:
    signed = candidate(pair, "one")
    good = request(pair, signed)
    checkpoint = signed.checkpoint

    def signed_by(origin: str = ORIGIN, by: str = "log", **changes: object) -> SignedCheckpoint:
        return replace(checkpoint, origin=origin, **changes).sign(key(by))  # type: ignore[arg-type]

    for bad, status in (
        (b"noise", 400),
        (good._replace(old_size=checkpoint.size + 1), 400),
        (good._replace(signed=signed_by(origin="registry.example/other")), 404),
        (good.encode().replace(ORIGIN.encode(), b"go.sum database tree", 1), 404),
        (good._replace(signed=signed_by(by="stranger")), 403),
        (good._replace(signed=signed_by(root=bytes(32))), 422),
        (b"x" * 200_000, 413),
    ):
        assert ask(pair, bad)[0] == status
    assert ask(pair, good)[0] == 200
    # Another tree of the same size.
    again = WitnessRequest(checkpoint.size, (), signed_by(root=bytes(32)))
    assert ask(pair, again)[0] == 422
    assert ask(pair, WitnessRequest(checkpoint.size, (), signed))[0] == 200


def test_the_longest_request_of_a_registry_fits_and_strangers_fill_no_memory(
    pair: InProcessPair,
) -> None:
    signed = candidate(pair, "one")
    origin = "registry.example/" + "o" * 200
    other = Checkpoint(origin=origin, size=2**62, root=bytes(32)).sign(key("log"))
    longest = WitnessRequest(2**61, (bytes(32),) * 63, other).encode()
    assert ask(pair, longest)[0] == 404  # it was read: this is another log
    assert ask(pair, longest + bytes(16_384))[0] == 413
    assert ask(pair, request(pair, signed))[0] == 200


def test_its_operator_sets_how_much_is_fetched_at_once(tmp_path: Path) -> None:
    with an_idle_pair(tmp_path, new_log_entries=4) as pair:
        for number in range(3):
            entry = pair.operators.entry(pair.operators.recipe(f"more-{number}", NOW))
            pair.registry.submit(submission(entry).encode())
        status, _, body = ask(pair, request(pair, candidate(pair, "one")))
        assert (status, b"raise new_log_entries" in body) == (422, True)


def test_what_a_witness_may_not_veto_it_does(pair: InProcessPair, tmp_path: Path) -> None:
    """A tree that does not end with a list; and one whose entries are missing."""
    assert ask(pair, request(pair, candidate(pair, "one")))[0] == 200
    entry = submission(pair.operators.entry(pair.operators.recipe("two", NOW)))
    pair.registry.submit(entry.encode())
    state = pair.registry._state
    pair.registry._folder.publish_tiles()
    unclosed = Checkpoint(origin=ORIGIN, size=state.size, root=state.frontier.root)
    assert pair.leader.cosigning is not None
    last = pair.leader.cosigning.last.size
    leaves = pair.registry._folder.leaves
    proof = consistency_proof(last, leaves)
    asked = WitnessRequest(last, proof, unclosed.sign(key("log")))
    status, _, body = ask(pair, asked)
    assert (status, b"not a list" in body) == (422, True)
    signed = candidate(pair, "three")
    bundle = pair.registry._folder.public / bundle_path(0, signed.checkpoint.size)
    kept = bundle.read_bytes()
    bundle.unlink()
    assert ask(pair, request(pair, signed))[0] == 503
    bundle.write_bytes(kept)
