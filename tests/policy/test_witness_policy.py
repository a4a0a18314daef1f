"""Which witnesses a policy requires, and which way a change of that goes."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.errors import InvalidInput
from chorister.policy import Policy
from chorister.policy.diff import diff
from chorister.policy.explain import explain
from chorister.policy.witnesses import (
    Strictness,
    WitnessPolicy,
    compare_witnesses,
    parse_witness_policy,
)
from tests.logworld import policy, vkey

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


# --- What changes from one to the next ----------------------------------------------------------

DEFINED = "".join(f"witness W{number} {each}\n" for number, each in enumerate(W))


def of(lines: str) -> WitnessPolicy:
    return parse_witness_policy(DEFINED + lines)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("quorum none", "quorum W0", "stricter"),
        ("group G any W0 W1\nquorum G", "group G all W0 W1\nquorum G", "stricter"),
        ("group G 2 W0 W1 W2\nquorum G", "group G 3 W0 W1 W2\nquorum G", "stricter"),
        ("group G any W0 W1 W2\nquorum G", "group G any W0 W1\nquorum G", "stricter"),
        ("group G all W0 W1\nquorum G", "group G all W0 W1 W2\nquorum G", "stricter"),
        # One of two operators' witnesses, then one of each.
        (
            "group X any W0 W1\ngroup Y any W2 W3\ngroup G any X Y\nquorum G",
            "group X any W0 W1\ngroup Y any W2 W3\ngroup G all X Y\nquorum G",
            "stricter",
        ),
        # Two of four, then one of each pair: W0 with W1 is no longer enough.
        (
            "group G 2 W0 W1 W2 W3\nquorum G",
            "group X any W0 W1\ngroup Y any W2 W3\ngroup G all X Y\nquorum G",
            "stricter",
        ),
        ("quorum W0", "quorum W1", "unclear"),
        ("group G 2 W0 W1 W2\nquorum G", "group G all W1 W3\nquorum G", "unclear"),
        ("quorum W0", "group G all W0\ngroup H any G\nquorum H", "same"),
        ("quorum none", "quorum none", "same"),
    ],
)
def test_the_direction_of_a_change(before: str, after: str, expected: Strictness) -> None:
    back: dict[Strictness, Strictness] = {"stricter": "looser"}
    assert compare_witnesses(of(before), of(after)) == expected
    assert compare_witnesses(of(after), of(before)) == back.get(expected, expected)


def test_names_within_the_lines_mean_nothing_but_keys_and_key_names_do() -> None:
    one = parse_witness_policy(f"witness A {W[0]} https://a.example/\nquorum A")
    assert compare_witnesses(one, of("quorum W0")) == "same"
    other_key = parse_witness_policy(f"witness W0 {vkey('w.example/0', 'other')}\nquorum W0")
    other_name = parse_witness_policy(f"witness W0 {vkey('v.example/0', 'witness 0')}\nquorum W0")
    for other in (other_key, other_name):
        assert compare_witnesses(one, other) == "unclear"


def test_too_many_sets_to_compare_are_unclear_and_take_no_time() -> None:
    lines = "".join(f"witness V{n} {vkey(f'v{n}', f'v{n}')}\n" for n in range(200))
    members = " ".join(f"V{n}" for n in range(200))
    half = parse_witness_policy(f"{lines}group G 100 {members}\nquorum G")
    more = parse_witness_policy(f"{lines}group G 101 {members}\nquorum G")
    assert compare_witnesses(half, more) == "unclear"
    every = parse_witness_policy(f"{lines}group G all {members}\nquorum G")
    most = parse_witness_policy(f"{lines}group G 199 {members}\nquorum G")
    assert compare_witnesses(every, most) == "looser"


@st.composite
def quorums(draw: st.DrawFn) -> WitnessPolicy:
    free = draw(st.permutations([f"W{number}" for number in range(len(W))]))
    lines = ""
    for number in range(draw(st.integers(0, 3))):
        members = free[: draw(st.integers(1, len(free)))]
        lines += f"group G{number} {draw(st.integers(1, len(members)))} {' '.join(members)}\n"
        free = [*free[len(members) :], f"G{number}"]
    return of(f"{lines}quorum {draw(st.sampled_from([*free, 'none']))}\n")


@given(quorums(), quorums())
def test_directions_are_those_of_every_set_of_witnesses(
    old: WitnessPolicy, new: WitnessPolicy
) -> None:
    names = [f"W{number}" for number in range(len(W))]
    sets = chain.from_iterable(combinations(names, count) for count in range(len(names) + 1))
    verdicts = [(old.satisfied(each), new.satisfied(each)) for each in sets]
    lost = (True, False) in verdicts
    gained = (False, True) in verdicts
    expected = {
        (False, False): "same",
        (False, True): "looser",
        (True, False): "stricter",
        (True, True): "unclear",
    }[lost, gained]
    assert compare_witnesses(old, new) == expected


def with_witnesses(lines: str | None) -> Policy:
    world = policy()
    log = world.log.model_dump() | {"witnesses": None if lines is None else DEFINED + lines}
    return Policy.model_validate(world.model_dump() | {"log": log})


@pytest.mark.parametrize(
    ("before", "after", "kind", "words"),
    [
        (None, "quorum W0", "less", "more cosignatures are needed: no witness -> w.example/0"),
        ("quorum none", "quorum W0", "less", "more cosignatures are needed"),
        (
            "group G 2 W0 W1 W2\nquorum G",
            "group G any W0 W1 W2\nquorum G",
            "more",
            "fewer cosignatures suffice: 2 of (w.example/0, w.example/1, w.example/2) -> 1 of (",
        ),
        ("quorum W0", None, "more", "fewer cosignatures suffice: w.example/0 -> no witness"),
        ("quorum W0", "quorum W1", "other", "look at it"),
        ("quorum W0", "# Only this one.\nquorum W0", "other", "same meaning: w.example/0"),
        (None, "quorum none", "other", "same meaning: no witness"),
    ],
)
def test_the_difference_of_two_policies_has_a_direction(
    before: str | None, after: str | None, kind: str, words: str
) -> None:
    (change,) = diff(with_witnesses(before), with_witnesses(after))
    assert (change.kind, change.field) == (kind, "log.witnesses")
    assert words in change.what


def test_an_explanation_names_the_witnesses() -> None:
    some, none = with_witnesses("group G any W0 W1\nquorum G"), with_witnesses("quorum none")
    line = "further witnesses have to cosign the log: 1 of (w.example/0, w.example/1)"
    assert line in explain(some)[0].lines
    assert not any("witness" in line for line in explain(none)[0].lines)
