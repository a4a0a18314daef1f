"""Conformance with the drafts of DAP and taskprov: a case for every MUST that applies (`rules`)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.aggregator.apps import Apps
from tests.aggregator.rules import RULES, TASKPROV, Rule

DRAFTS = Path(__file__).parents[2].parent / "drafts"
APPLIED = [rule for rule in RULES if rule.case is not None]
OF_TASKPROV = [rule for rule in TASKPROV if rule.case is not None]
APPLY = {"dap18.md": r"(3|4|5\.1)(\.|$)", "taskprov.md": ""}
"""The sections of a draft that lay something upon one of our parts."""
OBLIGING = {
    "dap18.md": {
        "3": 3,
        "3.1": 2,
        "3.2": 1,
        "3.5": 1,
        "3.6": 2,
        "4.1": 1,
        "4.1.2": 2,
        "4.2": 1,
        "4.2.2": 2,
        "4.2.3": 1,
        "4.4.1": 2,
        "4.4.2": 2,
        "4.4.2.1": 1,
        "4.4.2.2": 8,
        "4.5.1": 2,
        "4.5.3.1": 6,
        "4.5.3.2": 12,
        "4.5.3.4": 8,
        "4.5.4.1": 5,
        "4.5.4.2": 10,
        "4.5.4.3": 4,
        "4.5.5": 2,
        "4.6.1": 15,
        "4.6.2": 4,
        "4.6.3": 1,
        "4.6.4": 14,
        "4.6.5": 1,
        "5.1.1": 1,
    },
    "taskprov.md": {
        "3.2": 5,
        "3.3": 1,
        "3.4": 2,
        "3.5": 1,
        "3.6": 1,
        "3.7.1": 4,
        "3.7.2": 2,
        "3.7.3": 1,
        "3.8": 3,
        "3.9": 3,
        "5": 1,
    },
}
"""How many sentences of a section say MUST, REQUIRED or SHALL."""


@pytest.fixture(scope="module")
def apps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apps]:
    """One pair for all cases: each makes tasks of its own."""
    pair = Apps(tmp_path_factory.mktemp("pair"))
    yield pair
    pair.close()


@pytest.mark.parametrize("rule", APPLIED, ids=lambda rule: rule.name)
def test_every_must_that_applies(apps: Apps, rule: Rule) -> None:
    assert rule.case is not None
    rule.case(apps)
    assert apps.wire.tamper is None


@pytest.mark.parametrize("rule", OF_TASKPROV, ids=lambda rule: rule.name)
def test_every_must_of_taskprov(apps: Apps, rule: Rule) -> None:
    assert rule.case is not None
    rule.case(apps)
    assert apps.wire.tamper is None


def test_every_rule_has_a_case_or_a_reason() -> None:
    assert all((rule.case is None) == bool(rule.why_not) for rule in RULES + TASKPROV)
    assert (len(APPLIED), len(RULES)) == (96, 114)
    assert (len(OF_TASKPROV), len(TASKPROV)) == (22, 24)


def _sentences(text: str) -> Iterator[tuple[str, str]]:
    """Section and sentence for each sentence that obliges somebody, outside of figures."""
    numbers: list[int] = []
    figure = False
    paragraph: list[str] = []

    def obliging() -> Iterator[tuple[str, str]]:
        joined = " ".join(" ".join(paragraph).split())
        for sentence in re.split(r"(?<=[.:])\s+(?=[A-Z`*{])", joined):
            if re.search(r"\b(MUST|REQUIRED|SHALL)\b", sentence):
                yield ".".join(map(str, numbers)), sentence
        paragraph.clear()

    for line in text[text.index("--- middle") :].splitlines():
        if line.startswith("~~~"):
            figure = not figure
            continue
        if figure:
            continue
        if heading := re.match(r"(#+) ", line):
            yield from obliging()
            depth = len(heading[1])
            numbers[depth:] = []
            numbers.extend([0] * (depth - len(numbers)))
            numbers[-1] += 1
        elif not line.strip():
            yield from obliging()
        else:
            if re.match(r"\s*([*-]|\d+\.)\s", line):
                yield from obliging()
            paragraph.append(line)


def test_the_documentation_says_what_does_not_apply() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "dap.md").read_text()
    told = {line for line in page.splitlines() if re.match(r"\| (DAP|taskprov) \d", line)}
    assert told == {
        f"| {draft} {rule.section} | {rule.why_not} |"
        for draft, rules in (("DAP", RULES), ("taskprov", TASKPROV))
        for rule in rules
        if rule.why_not
    }


@pytest.mark.parametrize(("draft", "rules"), [("dap18.md", RULES), ("taskprov.md", TASKPROV)])
def test_no_must_is_forgotten(draft: str, rules: tuple[Rule, ...]) -> None:
    assert Counter(rule.section for rule in rules) == OBLIGING[draft]
    text = DRAFTS / draft
    if text.exists():  # beside the repository: the drafts are no part of it
        wanted = [each for each in _sentences(text.read_text()) if re.match(APPLY[draft], each[0])]
        assert [(rule.section, rule.words) for rule in rules] == [
            (section, rule.words if rule.words in sentence else sentence)
            for (section, sentence), rule in zip(wanted, rules, strict=False)
        ]
        assert len(wanted) == len(rules)
