"""All problems of a policy at once, each with its line and a remedy."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.errors import PolicyError
from chorister.policy import Policy
from chorister.policy.problems import line_numbers, problems
from tests.keyboard import POLICY_FILE

TEXT = POLICY_FILE.read_text()


def line_of(text: str, needle: str) -> int:
    return next(i for i, line in enumerate(text.split("\n"), start=1) if needle in line)


def edited(*changes: tuple[str, str]) -> str:
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    return text


def test_item_13_all_problems_are_listed_with_line_and_remedy() -> None:
    text = edited(
        ("reports = 4\n", "report = 4\n"),
        ('retention = "30d"', 'retention = "soon"'),
        ('type = "real"', 'type = "float"'),
        ("max_bins = 10_000", "max_bins = 1"),
        ('"user.age" = {', '"user.height" = {'),
        ('cosigning_keys = ["vrb', 'cosigning_keys = ["x'),
    )
    policy, found = problems(text.encode())
    assert policy is None
    lines = {problem.field: problem.line for problem in found}
    assert lines == {
        "aggregators.0.helper.cosigning_keys.0": line_of(text, '["x'),
        "device.reports": line_of(text, "[device]"),
        "device.report": line_of(text, "report = 4"),
        "streams.keyboard.retention": line_of(text, '"soon"'),
        "streams.keyboard.fields.perplexity.type": line_of(text, '"float"'),
        "analyses.keyboard.next-word.max_bins": line_of(text, "max_bins = 1"),
        "analyses.keyboard.next-word.fields.user.height": line_of(text, '"user.height"'),
    }
    assert all(problem.remedy and problem.why for problem in found)
    remedies = {problem.field: problem.remedy for problem in found}
    assert remedies["device.reports"] == "add reports = 2"
    assert remedies["device.report"] == "write reports, or remove it"
    with pytest.raises(PolicyError) as caught:
        Policy.load(text.encode())
    assert len(caught.value.problems) == 6


def test_item_13_references_are_all_listed() -> None:
    text = edited(
        ('group_by = ["user.locale"]', 'group_by = ["user.age", "user.nothing"]'),
        ('period = "180d"\nmin_ledger', 'period = "1d"\nmin_ledger'),
    )
    _, found = problems(text.encode())
    assert [problem.field for problem in found] == [
        "analyses.keyboard.next-word.group_by",
        "analyses.keyboard.next-word.group_by",
        "device.period",
    ]


def test_item_13_contradictions_have_lines_and_remedies() -> None:
    text = edited(("epsilon = 0.5\n", "epsilon = 1.5\n"), ("max_cells = 10", "max_cells = 2"))
    policy, found = problems(text.encode())
    assert policy is not None
    broken = [problem for problem in found if problem.kind == "contradiction"]
    assert [problem.line for problem in broken] == [
        line_of(text, "epsilon = 1.5"),
        line_of(text, "group_by"),
    ]
    assert "lower it to 1" in broken[0].remedy
    assert "raise max_cells to 5" in broken[1].remedy


def test_item_13_what_is_not_toml_has_a_line() -> None:
    text = edited(("version = 1", "version = = 1"))
    policy, (problem,) = problems(text.encode())
    assert policy is None
    assert problem.line == line_of(text, "version")
    assert problems(b"\xff\x00")[1]


def test_item_13_a_rehearsal_needs_no_keys_log_or_aggregators() -> None:
    tree = tomllib.loads(TEXT)
    start, end = TEXT.index("[log]"), TEXT.index("# All analyses together")
    bare = TEXT[:start] + TEXT[end:]
    bare = "\n".join(
        line for line in bare.split("\n") if not line.startswith(("author_keys", "collectors"))
    )
    fields = {problem.field for problem in problems(bare.encode())[1]}
    assert fields == {
        "log",
        "aggregators",
        "analyses.keyboard.next-word.author_keys",
        "analyses.keyboard.next-word.collectors",
    }
    with pytest.raises(PolicyError):
        Policy.load(bare.encode())
    policy = Policy.load_rehearsal(bare.encode())
    assert policy.device.epsilon == tree["device"]["epsilon"]
    assert policy.aggregators[0].leader.url.endswith(".invalid/dap/")
    # What is there is used, and still checked.
    assert Policy.load_rehearsal(TEXT.encode()) == Policy.load(TEXT.encode())
    with pytest.raises(PolicyError, match="epsilon"):
        Policy.load_rehearsal(bare.replace("epsilon = 1\n", "epsilon = -1\n", 1).encode())


def test_lines_of_every_way_to_write_toml() -> None:
    text = """a = 1
b.c = [
  1,  # ] not the end
  "]",
]
'd.e' = '''
f = 2
'''
g = { h = 1 }
[i."j.k"]
l = 1
[[m]]
n = 1
[m.o]
p = 1
[[m]]
n = 2
"""
    found = line_numbers(text)
    assert found["a",] == 1
    assert found["b", "c"] == 2
    assert found["d.e",] == 6
    assert ("f",) not in found
    assert found["g",] == 9
    assert found["i", "j.k", "l"] == 11
    assert found["m", "0", "n"] == 13
    assert found["m", "0", "o", "p"] == 15
    assert found["m", "1", "n"] == 17


@given(st.binary(max_size=400) | st.text(max_size=400).map(lambda text: text.encode("utf-8")))
def test_any_bytes_are_a_policy_or_have_problems(data: bytes) -> None:
    for rehearsal in (False, True):
        policy, found = problems(data, rehearsal=rehearsal)
        assert policy is not None or found


@given(st.lists(st.sampled_from(TEXT.split("\n")), max_size=60), st.randoms())
def test_any_lines_of_a_policy_are_one_or_have_problems(lines: list[str], random: object) -> None:
    del random
    policy, found = problems("\n".join(lines).encode())
    assert policy is not None or found
