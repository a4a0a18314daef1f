"""The reference names every key of a profile, every option and every step."""

from __future__ import annotations

import inspect
import re

import chorister as ch
from chorister.analyst.live_fleet import Profile
from tests.conftest import REPOSITORY

PAGE = re.sub(
    "```.*?```", "", (REPOSITORY / "docs/reference/analyst.md").read_text(), flags=re.DOTALL
)
NAMED = {word for quoted in re.findall(r"`([^`]+)`", PAGE) for word in re.split(r"[^\w]+", quoted)}


def test_every_key_of_a_profile_is_documented() -> None:
    assert set(Profile.model_fields) <= NAMED


def test_every_option_of_a_question_is_documented() -> None:
    options = set(inspect.signature(ch.Study.histogram).parameters) - {"self"}
    assert options <= NAMED


def test_every_method_of_study_and_result_is_documented() -> None:
    hidden = {"columns", "from_json", "to_json", "from_tree", "table", "rows", "rounds",
              "intervals", "next_number", "collect_round", "features", "bounded",
              "noise_trials"}  # fmt: skip
    for kind in (ch.Study, ch.Result):
        ours = [base for base in kind.__mro__ if base.__module__.startswith("chorister.")]
        public = {name for base in ours for name in vars(base) if not name.startswith("_")}
        fields = set(getattr(kind, "__dataclass_fields__", {}))
        assert public - fields - hidden <= NAMED
