"""`chorister policy` and `chorister recipe`, as a shell sees them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from typer.testing import CliRunner, Result

from chorister.cli import app
from chorister.policy import Policy
from chorister.recipe import Recipe, SignedRecipe, verify
from tests.keyboard import ANALYSIS, AUTHOR, EXAMPLE, POLICY, POLICY_FILE, RECIPE

RECIPE_FILE = EXAMPLE / "recipe.jws"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "author.pem"
    path.write_bytes(AUTHOR.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return path


def edited(tmp_path: Path, old: str, new: str) -> Path:
    text = POLICY_FILE.read_text()
    assert old in text
    path = tmp_path / "policy.toml"
    path.write_text(text.replace(old, new))
    return path


def test_policy_check() -> None:
    result = run("policy", "check", POLICY_FILE)
    assert result.exit_code == 0
    assert "to both together epsilon 5, from 1 report of local epsilon 5" in result.output
    assert "policy keyboard is consistent" in result.output


def test_policy_check_as_json() -> None:
    result = run("policy", "check", POLICY_FILE, "--json")
    found = json.loads(result.output)
    assert found["consistent"] is True
    assert found["digest"] == POLICY.digest.hex()
    assert found["cost"]["device"]["local_total"] == "32"
    fields = found["cost"]["analyses"][ANALYSIS]["fields"]
    assert fields["user.age"]["local_total"] == "2"
    assert len(found["remarks"]) == 3


def test_policy_check_fails_on_contradictions(tmp_path: Path) -> None:
    path = edited(tmp_path, "epsilon = 0.5\n", "epsilon = 1.5\n")
    result = run("policy", "check", path)
    assert result.exit_code == 1
    assert "contradiction" in result.output
    assert "1.5 can never be spent: the device allows 1" in result.output
    found = run("policy", "check", path, "--json")
    assert found.exit_code == 1
    assert json.loads(found.output)["contradictions"]


def test_policy_check_names_the_field_of_a_malformed_policy(tmp_path: Path) -> None:
    result = run("policy", "check", edited(tmp_path, "reports = 4\n", "report = 4\n"))
    assert result.exit_code == 2
    assert "device.reports" in result.stderr


def test_policy_diff(tmp_path: Path) -> None:
    newer = edited(tmp_path, "max_bins = 10_000", "max_bins = 20_000")
    result = run("policy", "diff", POLICY_FILE, newer)
    assert result.exit_code == 0
    assert "More may be asked or spent" in result.output
    assert "max_bins: 10000 -> 20000" in result.output
    found = json.loads(run("policy", "diff", newer, POLICY_FILE, "--json").output)
    assert [change["kind"] for change in found["changes"]] == ["less"]
    assert "Both mean the same" in run("policy", "diff", newer, newer).output


def test_policy_diff_speaks_of_days(tmp_path: Path) -> None:
    newer = edited(tmp_path, 'retention = "30d"', 'retention = "36h"')
    text = run("policy", "diff", POLICY_FILE, newer).output
    assert "streams.keyboard.retention: 30 days -> 1 day 12 hours" in text


def test_recipe_explain() -> None:
    result = run("recipe", "explain", RECIPE_FILE, "--policy", POLICY_FILE)
    assert result.exit_code == 0
    assert "8 x 34 = 272 bins" in result.output
    assert "allowed" in result.output


def test_item_14_recipe_explain_shows_the_question_first() -> None:
    text = run("recipe", "explain", RECIPE_FILE, "--policy", POLICY_FILE).output
    for words in (
        "Find words that follow each other",
        "one of 272 bins of age and ngram",
        "age in 7 intervals, with edges 10, 20, 30",
        "one of 9 words: a, all, home",
        f"the device runs: {RECIPE.query}",
        "keyboard.ngram (text), user.age (integer)",
        "from 2026-11-16 00:00 UTC to 2026-11-23 00:00 UTC, 7 days",
        "epsilon 0.2, delta 1e-6",
        "40% of the epsilon 0.5 that this analysis may cost in each period of 180 days",
        "at most one question of this cost in each period of 180 days",
        "in each period of 180 days, and 100% of its delta 1e-6, which runs out first",
        "50% of the devices, drawn at random, but none that has answered in the study",
    ):
        assert words in text, words
        assert text.index(words) < text.index("Would a device answer it?")
    assert "warning" not in text
    assert "Only bins with more than about 140 devices stand out" in text


def test_item_14_every_kind_of_feature_has_words(tmp_path: Path) -> None:
    draft = json.loads((EXAMPLE / "recipe.json").read_text())
    features = [
        {"kind": "categories", "column": "age", "values": list(range(30))},
        {"kind": "grid", "columns": ["x", "y"], "box": ["0", "0", "1", "1"], "level": 2},
        {"kind": "prefix_tree", "column": "ngram", "prefixes": [""], "vocabulary": ["a", "b"]},
    ]
    path = tmp_path / "draft.json"
    path.write_text(json.dumps({**draft, "features": features}))
    text = run("recipe", "explain", path, "--policy", POLICY_FILE).output
    assert "age as one of 30 listed values: 0, 1, 2" in text
    assert "18, 19 and 10 more" in text
    assert "x and y as one of 16 cells of a map from 0, 0, 1, 1" in text
    assert "the first word of ngram, one of 2 words: a, b" in text


def test_items_2_3_5_recipe_explain_makes_the_same_check(tmp_path: Path) -> None:
    draft = json.loads((EXAMPLE / "recipe.json").read_text())

    def explained(*options: str, **changes: object) -> tuple[list[str], list[str]]:
        path = tmp_path / "draft.json"
        path.write_text(json.dumps({**draft, **changes}))
        result = run("recipe", "explain", path, "--policy", POLICY_FILE, "--json", *options)
        found = json.loads(result.stdout)
        failed = [check["name"] for check in found["checks"] if not check["passed"]]
        return failed, found["warnings"]

    assert explained()[0] == []
    text = [{"kind": "intervals", "column": "ngram", "edges": ["0", "1"]}]
    assert explained(features=text)[0] == ["types"]
    upper = "SELECT upper(ngram) AS ngram, age FROM keyboard, user"
    assert explained(query=upper)[0] == ["query-class"]
    _, warnings = explained("--devices", "500")
    assert "nothing is released below 1,000" in warnings[0]


def test_recipe_explain_expects_a_windows_share_of_the_devices(tmp_path: Path) -> None:
    """Half of the devices in five parts, each in 1 of 10 windows; 30 days are kept, 7 are open."""
    draft = json.loads((EXAMPLE / "recipe.json").read_text())
    draft["series"] = {"windows": 10, "every": 7 * 86_400, "answers": 1}
    draft["periods"] = {"keyboard": 28 * 86_400}
    path, policy = tmp_path / "draft.json", tmp_path / "policy.toml"
    path.write_text(json.dumps(draft))
    limits = 'windows = 10\nlongest = "80d"\nanswers = 1\ncells = 50\n'
    policy.write_text(POLICY_FILE.read_text() + f'\n[analyses."{ANALYSIS}".series]\n{limits}')
    text = run("recipe", "explain", path, "--policy", policy, "--devices", "40000").output
    assert "About 400 devices are expected in each part of the fleet" in text
    assert "has only 23 days of them left" in text


def test_recipe_explain_as_json() -> None:
    result = run("recipe", "explain", RECIPE_FILE, "--policy", POLICY_FILE, "--json")
    found = json.loads(result.output)
    assert found["allowed"] is True
    assert found["signed"] is True
    assert {"name", "passed", "why"} == set(found["checks"][0])
    assert "author" in [check["name"] for check in found["checks"]]


def test_recipe_explain_a_draft() -> None:
    result = run("recipe", "explain", EXAMPLE / "recipe.json", "--policy", POLICY_FILE)
    assert result.exit_code == 0
    assert "no device answers it until you sign it" in result.output


def test_recipe_explain_says_no(tmp_path: Path) -> None:
    stricter = edited(tmp_path, "smallest = 1_000", "smallest = 2_000")
    result = run("recipe", "explain", RECIPE_FILE, "--policy", stricter)
    assert result.exit_code == 1
    assert "NO  cohort" in result.output
    assert "refused" in result.output
    late = str(RECIPE.window.closes)
    found = run("recipe", "explain", RECIPE_FILE, "--policy", POLICY_FILE, "--at", late, "--json")
    assert found.exit_code == 1
    failed = [c["name"] for c in json.loads(found.output)["checks"] if not c["passed"]]
    assert failed == ["open"]


@pytest.mark.parametrize(
    "change",
    [
        (b"1000", b"1000,"),
        (b'"asymmetric"', b'"laplace"'),
        (b'"local_epsilon": "2"', b'"local_epsilon": "1.000000000000000000000000000001"'),
        (b"", b""),
    ],
)
def test_recipe_explain_as_json_whatever_it_is(change: tuple[bytes, bytes], tmp_path: Path) -> None:
    draft = tmp_path / "draft.json"
    text = (EXAMPLE / "recipe.json").read_bytes()
    draft.write_bytes(text.replace(*change) if change[0] else b"junk")
    result = run("recipe", "explain", draft, "--policy", POLICY_FILE, "--json")
    assert result.exit_code == 2
    found = json.loads(result.stdout)
    assert (found["allowed"], found["signed"]) == (False, False)
    assert [(check["name"], check["passed"]) for check in found["checks"]] == [("form", False)]
    assert found["checks"][0]["why"] in result.stderr


def test_recipe_explain_as_json_is_ascii(tmp_path: Path) -> None:
    draft = tmp_path / "draft.json"
    text = (EXAMPLE / "recipe.json").read_text()
    draft.write_text(text.replace(RECIPE.collector, "ab" * 32))
    result = run("recipe", "explain", draft, "--policy", POLICY_FILE, "--json")
    assert result.exit_code == 1
    assert result.stdout.isascii()
    failed = [check["name"] for check in json.loads(result.stdout)["checks"] if not check["passed"]]
    assert failed == ["collector"]


def test_new_explain_sign(tmp_path: Path, key_file: Path) -> None:
    """The way of a recipe, from nothing to signed."""
    draft, signed = tmp_path / "draft.json", tmp_path / "signed.jws"
    assert run("recipe", "new", "--policy", POLICY_FILE, "-o", draft).exit_code == 0
    assert run("recipe", "explain", draft, "--policy", POLICY_FILE).exit_code == 0
    assert run("recipe", "sign", draft, "--key", key_file, "-o", signed).exit_code == 0
    assert run("recipe", "explain", signed, "--policy", POLICY_FILE).exit_code == 0
    verify(SignedRecipe.parse(signed.read_bytes()), POLICY.analyses[ANALYSIS].author_keys)
    printed = run("recipe", "new", "--policy", POLICY_FILE, "--analysis", ANALYSIS)
    required = [name for name, field in Recipe.model_fields.items() if field.is_required()]
    assert list(json.loads(printed.output)) == required


def test_a_new_series(tmp_path: Path) -> None:
    policy, draft = tmp_path / "policy.toml", tmp_path / "draft.json"
    limits = 'windows = 26\nlongest = "200d"\nanswers = 2\ncells = 130\n'
    policy.write_text(f'{POLICY_FILE.read_text()}\n[analyses."{ANALYSIS}".series]\n{limits}')
    made = run("recipe", "new", "--policy", policy, "--every", "7d", "-o", draft)
    assert made.exit_code == 0
    recipe = Recipe.draft(draft.read_bytes())
    assert (recipe.window_count, recipe.answers) == (26, 1)
    told = run("recipe", "explain", draft, "--policy", policy)
    assert told.exit_code == 0
    assert "in one of 26 windows, which each device draws at random" in " ".join(
        told.output.split()
    )
    assert run("recipe", "explain", draft, "--policy", POLICY_FILE).exit_code == 1
    for wrong in ("7", "never", "1s"):
        assert run("recipe", "new", "--policy", policy, "--every", wrong).exit_code == 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"query": "SELECT age FROM user WHERE ("}, "incomplete input"),
        ({"query": "SELECT locale AS age, '' AS ngram FROM user"}, "no such column: locale"),
        ({"query": "SELECT 1 AS age"}, "the column ngram, which the query does not select"),
    ],
)
def test_recipe_explain_compiles_the_query(
    tmp_path: Path, change: dict[str, str], why: str
) -> None:
    draft = tmp_path / "draft.json"
    draft.write_text(json.dumps(json.loads((EXAMPLE / "recipe.json").read_text()) | change))
    result = run("recipe", "explain", draft, "--policy", POLICY_FILE, "--json")
    assert result.exit_code == 1, result.output
    failed = [check for check in json.loads(result.stdout)["checks"] if not check["passed"]]
    assert [check["name"] for check in failed] == ["query-class"]
    assert why in failed[0]["why"]


def test_new_for_listed_queries(tmp_path: Path) -> None:
    policy, draft = EXAMPLE.parent / "fitness" / "policy.toml", tmp_path / "draft.json"
    rules = Policy.load(policy)
    [analysis] = [name for name, each in rules.analyses.items() if each.query_class == "exact"]
    made = run("recipe", "new", "--policy", policy, "--analysis", analysis, "-o", draft)
    assert made.exit_code == 0, made.output
    recipe = json.loads(draft.read_text())
    assert recipe["query"] == "SELECT steps FROM walks"
    assert recipe["features"][0]["column"] == "steps"
    explained = run("recipe", "explain", draft, "--policy", policy)
    assert explained.exit_code == 0, explained.output


def test_signing_the_example_gives_the_example(key_file: Path) -> None:
    result = run("recipe", "sign", EXAMPLE / "recipe.json", "--key", key_file)
    assert result.output.strip() == RECIPE_FILE.read_text().strip()


def test_recipe_schema() -> None:
    assert json.loads(run("recipe", "schema").output)["$id"] == "urn:chorister:recipe:1"


def test_wrong_inputs_are_told_in_one_line(tmp_path: Path) -> None:
    junk = tmp_path / "junk"
    junk.write_bytes(b"junk")
    other = tmp_path / "other.pem"
    other.write_bytes(
        X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    draft = EXAMPLE / "recipe.json"
    for arguments in (
        ("policy", "check", tmp_path / "nothing"),
        ("recipe", "explain", tmp_path / "nothing", "--policy", POLICY_FILE),
        ("recipe", "explain", junk, "--policy", POLICY_FILE),
        ("recipe", "explain", RECIPE_FILE, "--policy", junk),
        ("recipe", "sign", draft, "--key", junk),
        ("recipe", "sign", draft, "--key", other),
        ("recipe", "new", "--policy", POLICY_FILE, "--analysis", "nothing"),
        ("recipe", "new", "--policy", POLICY_FILE, "-o", tmp_path / "no" / "folder"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert result.stderr.startswith("error:")
