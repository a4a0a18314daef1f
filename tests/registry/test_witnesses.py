"""A registry and its further witnesses: who is asked what, and what counts as a fork."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.errors import ChoristerError, DecodeError, InvalidInput, LogForked, ServiceError
from chorister.policy.witnesses import parse_vkey, parse_witness_policy
from chorister.registry.witnesses import Witnessing
from chorister.transparency.checkpoint import Checkpoint
from chorister.transparency.note import cosign_note
from chorister.transparency.tree import EMPTY_ROOT
from chorister.transparency.witness import SIZE_TYPE, Witness, WitnessRequest, check_request
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


def test_a_cosignature_by_another_key_is_not_taken(world: World) -> None:
    side = witnessing(AWitness(signs_as="stranger"))
    with pytest.raises(ChoristerError, match="no cosignature by its key"):
        side.ask(world.registry)
    side.ask_or_report(world.registry)
    assert side.alarm is None
    assert NAME not in names(world)


@pytest.mark.parametrize("status", [200, 404, 409, 500])
def test_whatever_a_witness_answers_the_error_is_typed(world: World, status: int) -> None:
    transport = httpx2.MockTransport(lambda _: httpx2.Response(status, content=b"\xff\x00"))
    witness = Witness(parse_vkey(vkey(NAME, "witness")), "https://w.example", transport=transport)
    with pytest.raises(ServiceError):
        Witnessing(witness=witness, interval=60).ask(world.registry)


# --- Requests and policies -----------------------------------------------------------------------


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


W = [vkey(f"w.example/{number}", f"witness {number}") for number in range(4)]


def test_quorums_are_those_of_groups() -> None:
    policy = parse_witness_policy(
        "# two operators\n"
        f"witness X1 {W[0]}\nwitness X2 {W[1]} https://x2.example/\n\twitness Y1 {W[2]}\n"
        "group X any X1 X2\n\ngroup both all X Y1\nquorum both\n"
    )
    assert policy.witnesses["X2"].url == "https://x2.example/"
    for cosigned, enough in (
        ((), False),
        (("X1", "X2"), False),
        (("Y1",), False),
        (("X2", "Y1"), True),
        (("X1", "X2", "Y1"), True),
    ):
        assert policy.satisfied(cosigned) is enough
    assert parse_witness_policy("quorum none").satisfied(())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "quorum X",
        f"witness X {W[0]}",
        f"witness X {W[0]}\nwitness X {W[1]}\nquorum X",
        f"witness X {W[0]}\nwitness Y {W[0]}\nquorum X",
        f"witness none {W[0]}\nquorum none",
        f"witness X {W[0][:-4]}AAA=\nquorum X",
        f"witness X {W[0].replace('w.example', 'v.example')}\nquorum X",
        f"witness X {W[0]}\ngroup G 2 X\nquorum G",
        f"witness X {W[0]}\ngroup G 0 X\nquorum G",
        f"witness X {W[0]}\ngroup G any\nquorum G",
        f"witness X {W[0]}\ngroup G any X X\nquorum G",
        f"witness X {W[0]}\ngroup G any X\ngroup H any X\nquorum G",
        f"group G any G\nwitness X {W[0]}\nquorum X",
        f"witness X {W[0]}\nquorum X\nquorum X",
        f"log {W[0]}\nquorum none",
        "quorum none\r",
        "nonsense",
    ],
)
def test_policies_that_say_nothing_clear_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_witness_policy(text)


@given(st.text(max_size=200))
def test_arbitrary_text_as_a_witness_policy(text: str) -> None:
    for candidate in (text, f"quorum none\n{text}", f"witness X {W[0]} {text}\nquorum X"):
        try:
            parse_witness_policy(candidate)
        except InvalidInput:
            continue
