"""Conformance with the drafts of DAP and taskprov: a case for every MUST that applies (`rules`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.aggregator.apps import Apps
from tests.aggregator.rules import RULES, TASKPROV, Rule

DRAFTS = Path(__file__).parents[2].parent / "drafts"
APPLIED = [rule for rule in RULES if rule.case is not None]
OF_TASKPROV = [rule for rule in TASKPROV if rule.case is not None]


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


@pytest.mark.parametrize(
    ("draft", "sections", "rules"),
    [("dap18.md", r"(3|4|5\.1)(\.|$)", RULES), ("taskprov.md", "", TASKPROV)],
)
def test_no_must_is_forgotten(draft: str, sections: str, rules: tuple[Rule, ...]) -> None:
    text = DRAFTS / draft
    if not text.exists():
        pytest.skip("the drafts' texts are not part of the repository")
    wanted = [each for each in _sentences(text.read_text()) if re.match(sections, each[0])]
    assert [(rule.section, rule.words) for rule in rules] == [
        (section, rule.words if rule.words in sentence else sentence)
        for (section, sentence), rule in zip(wanted, rules, strict=False)
    ]
    assert len(wanted) == len(rules)
