"""A registry and its further witnesses: who is asked what, and what counts as a fork."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.errors import (
    ChoristerError,
    DecodeError,
    LogForked,
    LogSignatureInvalid,
    ServiceError,
)
from chorister.policy.witnesses import parse_vkey
from chorister.registry.registry import CANDIDATE_LIFETIME
from chorister.registry.witnessing import Witnessing
from chorister.transparency.checkpoint import Checkpoint
from chorister.transparency.note import cosign_note
from chorister.transparency.tree import EMPTY_ROOT
from chorister.transparency.witness import (
    SIZE_TYPE,
    Conflict,
    Witness,
    WitnessRequest,
    check_request,
)
from tests.logworld import (
    HELPER,
    LEADER,
    ORIGIN,
    World,
    hpke_entry,
    key,
    public,
    recipe_entry,
    vkey,
)

NAME = "witness.example/w1"


@dataclass
class AWitness:
    """A witness by the book, in this process."""

    last: Checkpoint = field(
        default_factory=lambda: Checkpoint(origin=ORIGIN, size=0, root=EMPTY_ROOT)
    )
    asked: list[WitnessRequest] = field(default_factory=list)
    signs_as: str = "witness"

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        asked = WitnessRequest.parse(request.read())
        self.asked.append(asked)
        asked.signed.check_log(ORIGIN, [public("log")])
        if asked.old_size != self.last.size:
            return httpx2.Response(
                409, content=f"{self.last.size}\n", headers={"content-type": SIZE_TYPE}
            )
        try:
            check_request(asked, self.last)
        except ChoristerError as error:
            return httpx2.Response(422, content=str(error))
        self.last = asked.signed.checkpoint
        line = cosign_note(self.last.text, name=NAME, key=key(self.signs_as), time=7)
        return httpx2.Response(200, content=f"— other/w AAAAAAAA\n{line.encode()}\n".encode())


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    world.publish(hpke_entry(LEADER), hpke_entry(HELPER))
    return world


def witnessing(witness: AWitness) -> Witnessing:
    transport = httpx2.MockTransport(witness.answer)
    key_ = parse_vkey(vkey(NAME, "witness"))
    return Witnessing(
        witness=Witness(key_, "https://witness.example/", transport=transport), interval=60
    )


def names(world: World) -> list[str]:
    return [line.name for line in world.checkpoint().note.signatures]


def test_a_witness_cosigns_each_tree_and_devices_get_its_line(world: World) -> None:
    witness = AWitness()
    side = witnessing(witness)
    side.ask(world.registry)
    assert NAME in names(world)
    assert NAME in [line.name for line in world.proof().signed.note.signatures]
    # The aggregators sign the same tree again: the witness's line stays.
    world.publish()
    assert NAME in names(world)
    world.publish(recipe_entry("one"))
    assert NAME not in names(world)
    side.ask(world.registry)
    assert NAME in names(world)
    assert [request.old_size for request in witness.asked] == [0, 3]
    assert witness.asked[1].proof


def test_a_registry_that_forgot_what_a_witness_saw_asks_it(world: World) -> None:
    witness = AWitness()
    witnessing(witness).ask(world.registry)
    world.publish(recipe_entry("one"))
    witnessing(witness).ask(world.registry)  # after a restart
    assert [request.old_size for request in witness.asked] == [0, 0, 3]
    assert witness.last == world.checkpoint().checkpoint


def test_a_witness_that_saw_another_log_raises_the_alarm(world: World) -> None:
    size = world.checkpoint().checkpoint.size
    for other in (
        Checkpoint(origin=ORIGIN, size=size, root=bytes(32)),
        Checkpoint(origin=ORIGIN, size=size - 1, root=bytes(32)),
        Checkpoint(origin=ORIGIN, size=size + 1, root=bytes(32)),
    ):
        side = witnessing(AWitness(last=other))
        with pytest.raises(LogForked):
            side.ask(world.registry)
        side.ask_or_report(world.registry)
        assert side.alarm is not None
        assert NAME not in names(world)


def test_a_witness_that_named_an_impossible_size_once_is_asked_again(world: World) -> None:
    witness = AWitness()
    sizes = ["9999999999999999999\n"]

    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(409, content=sizes.pop()) if sizes else witness.answer(request)

    key_ = parse_vkey(vkey(NAME, "witness"))
    transport = httpx2.MockTransport(answer)
    side = Witnessing(witness=Witness(key_, "https://w.example", transport=transport), interval=60)
    side.ask_or_report(world.registry)
    assert side.alarm is not None
    assert "9999999999999999999 entries" in side.alarm
    side.ask_or_report(world.registry)
    assert NAME in names(world)
    assert side.alarm is not None  # until the next start


@pytest.mark.parametrize("said", ["", "{size}\n", "another root"])
def test_a_conflict_about_the_same_size_is_a_fork(world: World, said: str) -> None:
    """omniwitness answers an empty 409 if it knows another root of the same size."""
    size = world.checkpoint().checkpoint.size
    answers = iter([f"{size}\n", said.format(size=size)])
    transport = httpx2.MockTransport(lambda _: httpx2.Response(409, content=next(answers)))
    witness = Witness(parse_vkey(vkey(NAME, "witness")), "https://w.example", transport=transport)
    side = Witnessing(witness=witness, interval=60)
    side.ask_or_report(world.registry)
    assert side.alarm is not None
    assert "refuses the checkpoint" in side.alarm


def test_a_witness_with_a_new_size_each_time_is_reported(world: World) -> None:
    sizes = iter([1, 2, 1, 2])
    transport = httpx2.MockTransport(lambda _: httpx2.Response(409, content=f"{next(sizes)}\n"))
    witness = Witness(parse_vkey(vkey(NAME, "witness")), "https://w.example", transport=transport)
    with pytest.raises(ServiceError, match="yet another size"):
        Witnessing(witness=witness, interval=60).ask(world.registry)


def test_a_request_has_the_signature_of_the_log_alone(world: World) -> None:
    """However many have cosigned: omniwitness, for one, reads 16 KiB."""
    witness = AWitness()
    side = witnessing(witness)
    side.ask(world.registry)
    side.ask(world.registry)
    for request in witness.asked:
        assert [line.name for line in request.signed.note.signatures] == [ORIGIN]
    assert NAME in names(world)


def test_a_witness_need_not_sign_the_same_tree_again_before_it_is_published(world: World) -> None:
    """Aggregators may take longer than a candidate waits; a witness may have a long interval."""
    world.submit(recipe_entry("one"))
    world.clock.advance(1)
    world.registry.issue()
    witness = AWitness()
    witnessing(witness).ask(world.registry)
    world.clock.advance(CANDIDATE_LIFETIME)
    world.publish()
    assert NAME in names(world)
    assert len(witness.asked) == 1


def test_a_cosignature_by_another_key_is_not_taken(world: World) -> None:
    side = witnessing(AWitness(signs_as="stranger"))
    with pytest.raises(ChoristerError, match="no cosignature by its key"):
        side.ask(world.registry)
    side.ask_or_report(world.registry)
    assert side.alarm is None
    assert NAME not in names(world)


@pytest.mark.parametrize("said", [b"\xff\x00", b"\n" * 60_000, b"1" * 70_000])
@pytest.mark.parametrize("status", [200, 204, 301, 307, 404, 409, 500])
def test_whatever_a_witness_answers_the_error_is_typed(
    world: World, status: int, said: bytes
) -> None:
    """A redirect is not followed, and a flood is cut."""
    headers = {"location": "https://elsewhere.example/add-checkpoint"}

    def answer(request: httpx2.Request) -> httpx2.Response:
        assert request.url.host == "w.example"
        return httpx2.Response(status, content=said, headers=headers)

    transport = httpx2.MockTransport(answer)
    witness = Witness(parse_vkey(vkey(NAME, "witness")), "https://w.example", transport=transport)
    with pytest.raises(ServiceError):
        Witnessing(witness=witness, interval=60).ask(world.registry)


@given(st.sampled_from([200, 409, 422]), st.binary(max_size=200) | st.text(max_size=200))
def test_arbitrary_answers_of_a_witness(status: int, said: bytes | str) -> None:
    body = said if isinstance(said, bytes) else said.encode(errors="ignore")
    transport = httpx2.MockTransport(lambda _: httpx2.Response(status, content=body))
    key_ = parse_vkey(vkey(NAME, "witness"))
    signed = Checkpoint(origin=ORIGIN, size=3, root=bytes(32)).sign(key("log"))
    with Witness(key_, "https://w.example", transport=transport) as witness:
        try:
            found = witness.add_checkpoint(WitnessRequest(1, (), signed))
        except (LogForked, LogSignatureInvalid, ServiceError):
            return
    assert isinstance(found, Conflict)
    assert body == f"{found.size}\n".encode()


# --- Requests -----------------------------------------------------------------------------------


def test_requests_round_trip(world: World) -> None:
    signed, proof = world.registry.to_witness(2)
    request = WitnessRequest(2, proof, signed)
    assert WitnessRequest.parse(request.encode()) == request
    lines = request.encode().decode().split("\n")
    assert lines[0] == "old 2"
    assert [base64.b64decode(line) for line in lines[1 : 1 + len(proof)]] == list(proof)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_as_a_request(data: bytes) -> None:
    for candidate in (data, b"old 1\n" + data, b"old 1\n\n" + data):
        with pytest.raises(DecodeError):
            WitnessRequest.parse(candidate)
