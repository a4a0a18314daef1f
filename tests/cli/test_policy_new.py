"""`chorister policy new`: from nothing to a policy that passes the check, and to a rehearsal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import chorister as ch
from chorister.cli import app
from chorister.fleet.first_policy import declared_fields, read_table
from chorister.key_files import read_collector_key, read_signing_key
from chorister.policy import Policy


def run(*arguments: str | Path, text: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=text)


@pytest.fixture
def weather(tmp_path: Path) -> Path:
    path = tmp_path / "Weather 2026.csv"
    rows = ["device,City,temp,hours,blank"]
    rows += [f"{i},{'Rome' if i % 2 else 'Paris'},{i / 10},{i % 24}," for i in range(400)]
    path.write_text("\n".join(rows) + "\n")
    return path


def test_item_13_from_a_table_to_a_policy_that_passes(tmp_path: Path, weather: Path) -> None:
    made = run("policy", "new", tmp_path / "new", "--from", weather)
    assert made.exit_code == 0, made.output
    path = tmp_path / "new" / "policy.toml"
    checked = run("policy", "check", path, "--json")
    assert checked.exit_code == 0, checked.output
    assert json.loads(checked.output)["consistent"]
    policy = Policy.load(path)
    types = {ref: field.type for ref, field in policy.fields.items()}
    assert types == {
        "weather_2026.city": "text",
        "weather_2026.temp": "real",
        "weather_2026.hours": "integer",
        "weather_2026.blank": "text",
    }
    # Nothing of the data is in it, and no field is declared as not sensitive.
    assert "Rome" not in path.read_text()
    assert all(field.group_values is None for field in policy.fields.values())
    # The keys are those that it lists, and nobody else can read them.
    (analysis,) = policy.analyses.values()
    keys = tmp_path / "new" / "keys"
    read_signing_key(keys / "author.key")
    # Operators need its public half, and nobody else should open the file.
    assert json.loads((keys / "collector.json").read_text())["config"] in made.output
    read_collector_key(keys / "collector.json")
    assert len(analysis.author_keys) == 1
    assert {file.stat().st_mode & 0o077 for file in keys.iterdir()} == {0}


def test_item_13_the_new_policy_can_be_rehearsed(tmp_path: Path) -> None:
    made = run("policy", "new", tmp_path / "new", "--field", "age:integer", "--json")
    assert made.exit_code == 0, made.output
    people = {"age": [20, 30, 40], "count": [40_000] * 3}
    rehearsal = ch.rehearse(people, json.loads(made.output)["policy"], seed=1)
    result = rehearsal.study("first").histogram(ch.intervals("age", [10, 25, 35, 45])).run()
    assert result.n_reports == 120_000


def test_item_13_the_table_itself_can_be_rehearsed(tmp_path: Path) -> None:
    """With headers that are no names of fields, and text that looks like something else."""
    path = tmp_path / "people.csv"
    rows = ["Age,Smoker,Joined on,Postcode (ZIP),weight"]
    rows += [f"{20 + i % 40},{'true' if i % 4 else 'false'},2026-01-03,0{i},70" for i in range(200)]
    path.write_text("\n".join([*rows, "30,true,2026-01-04,K1A,70.5"]) + "\n")
    made = run("policy", "new", tmp_path / "new", "--from", path)
    assert made.exit_code == 0, made.output
    assert "Joined on is the field joined_on" in made.output
    people = ch.rehearse(path, tmp_path / "new" / "policy.toml", devices=200_000, seed=1)
    study = people.study("first")
    for feature in (
        ch.categories("smoker", ["true", "false"]),
        ch.categories("joined_on", ["2026-01-03", "2026-01-04"]),
        ch.categories("postcode_zip", ["01", "0199"]),
        ch.intervals("weight", [0, 70.2, 100]),
    ):
        question = study.histogram(feature)
        assert question.cost().allowed
        assert people.truth(question)[1:].min() > 0
    path.write_text(path.read_text().replace("weight", "age", 1))
    with pytest.raises(ch.errors.InvalidInput, match="several columns are the field"):
        ch.rehearse(path, tmp_path / "new" / "policy.toml")


def test_item_13_it_refuses_what_makes_no_policy(tmp_path: Path, weather: Path) -> None:
    folder = tmp_path / "new"
    capital = tmp_path / "capital.csv"  # else the field device would be everybody's number
    capital.write_text("Device,age\n1,5\n")
    for wrong in (
        ["--epsilon", "0"],
        ["--epsilon", "much"],
        ["--period", "a while"],
        ["--leader", "nowhere"],
        ["--field", "age"],
        ["--field", "age:number"],
        ["--from", str(tmp_path / "none.csv")],
        ["--from", str(capital)],
        ["--from", str(tmp_path / "table.xlsx")],
    ):
        given = wrong if wrong[0] in ("--from", "--field") else [*wrong, "--from", str(weather)]
        refused = run("policy", "new", folder, *given)
        assert refused.exit_code == 2, (wrong, refused.output)
        assert not folder.exists()
    assert run("policy", "new", folder, "--from", weather).exit_code == 0
    before = (folder / "policy.toml").read_bytes()
    assert run("policy", "new", folder, "--from", weather).exit_code == 2
    assert (folder / "policy.toml").read_bytes() == before


@pytest.mark.parametrize("epsilon", ["0.02", "0.5", "8", "40"])
@pytest.mark.parametrize("reports", ["1", "7"])
def test_item_13_every_budget_makes_a_consistent_policy(
    tmp_path: Path, epsilon: str, reports: str
) -> None:
    made = run(
        "policy", "new", tmp_path / "new", "--field", "x:real", "--epsilon", epsilon,
        "--reports", reports, "--period", "1d",
    )  # fmt: skip
    each = float(epsilon) / int(reports)
    if not 0.01 <= each <= 20:
        assert made.exit_code == 2
        return
    assert made.exit_code == 0, made.output
    assert run("policy", "check", tmp_path / "new" / "policy.toml").exit_code == 0


def test_item_13_questions_at_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chorister.cli.policy.at_terminal", lambda: True)
    answers = "age:integer, note:text\nsteps\nTo see how old people are\n2\n30d\n3\n\n\n"
    made = run("policy", "new", tmp_path / "new", text=answers)
    assert made.exit_code == 0, made.output
    policy = Policy.load(tmp_path / "new" / "policy.toml")
    assert policy.name == "steps"
    assert policy.device.epsilon == 2
    assert policy.device.reports == 3
    assert set(policy.fields) == {"person.age", "person.note"}


def test_types_of_columns(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b,c,d,count\n1,1,x,,5\n2,1.5,1,,5\n-3,2e3,2,,5\n")
    found = read_table(path)
    assert found.columns == {"a": "integer", "b": "real", "c": "text", "d": "text"}
    assert not found.stream


def test_names_are_changed_aloud_and_never_merged(tmp_path: Path) -> None:
    """A column that silently got another name, or none, would be looked for in vain."""
    path = tmp_path / "people.csv"
    path.write_text("device,Größe,naïve score\n1,2,3\n", encoding="utf-8")
    made = run("policy", "new", tmp_path / "new", "--from", path)
    assert "Größe is the field grosse here" in made.output
    assert "naïve score is the field naive_score here" in made.output
    assert set(Policy.load(tmp_path / "new" / "policy.toml").fields) == {
        "people.grosse",
        "people.naive_score",
    }
    for wrong in (["a b:text", "a_b:text"], ["x:text", "x:real"], ["年齢:integer"], ["count:real"]):
        with pytest.raises(ch.errors.InvalidInput):
            declared_fields(wrong)
    path.write_text("a,a\n1,2\n")
    with pytest.raises(ch.errors.InvalidInput, match="several columns"):
        read_table(path)
    path.write_bytes("a\nü\n".encode("latin-1"))
    with pytest.raises(ch.errors.InvalidInput, match="UTF-8"):
        read_table(path)


def test_a_wrong_answer_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chorister.cli.policy.at_terminal", lambda: True)
    answers = "age\nage:integer\n\n\nmuch\n-1\n2\na while\n30d\nno\n999\n3\n\n\n"
    made = run("policy", "new", tmp_path / "new", text=answers)
    assert made.exit_code == 0, made.output
    policy = Policy.load(tmp_path / "new" / "policy.toml")
    assert policy.device.epsilon == 2
    assert policy.device.reports == 3


def test_item_13_check_lists_all_problems(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('version = 1\nname = "x"\n[device]\nepsilon = "a"\n')
    found = run("policy", "check", path)
    assert found.exit_code == 2
    assert "line 4: device.epsilon" in found.stderr
    assert "add delta = 1e-6" in found.stderr
    assert "problems" in found.stderr
    listed = json.loads(run("policy", "check", path, "--json").output)
    assert len(listed["problems"]) >= 6
    fewer = json.loads(run("policy", "check", path, "--rehearsal", "--json").output)
    assert len(fewer["problems"]) < len(listed["problems"])
