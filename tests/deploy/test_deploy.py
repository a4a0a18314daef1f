"""Container, compose and unit files, dashboard and alerts: they name what exists."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml  # type: ignore[import-untyped]

from chorister.aggregator.config import AggregatorConfig, HelperConfig, LeaderConfig, load_config
from chorister.aggregator.operations.metrics import Metrics
from chorister.cli import app
from chorister.registry.server import RegistryConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
PAGE = ROOT / "docs" / "howto" / "two-operators.md"
MODELS: dict[str, type[AggregatorConfig]] = {"LEADER": LeaderConfig, "HELPER": HelperConfig}


def check_command(words: list[str]) -> None:
    """The command exists, and has these options."""
    command: Any = typer.main.get_command(app)
    rest = list(words)
    while rest and hasattr(command, "commands") and rest[0] in command.commands:
        command = command.commands[rest.pop(0)]
    assert not hasattr(command, "commands"), f"no such command: {' '.join(words)}"
    options = {name for each in command.params for name in each.opts}
    for word in rest:
        if word.startswith("--"):
            assert word.partition("=")[0] in options, f"{words}: {word}"


def check_settings(names: Iterator[str]) -> int:
    """Variables of the environment are settings of their role; how many there were."""
    number = 0
    for name in names:
        found = re.fullmatch(r"CHORISTER_(LEADER|HELPER)__(\w+)", name)
        if found is not None:
            assert found[2].lower() in MODELS[found[1]].model_fields, name
            number += 1
    return number


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded = yaml.safe_load((DEPLOY / "compose.yml").read_text())
    assert isinstance(loaded, dict)
    return loaded


def test_the_compose_files_commands_and_settings_exist(compose: dict[str, Any]) -> None:
    ours = {
        name: each for name, each in compose["services"].items() if each["image"] == "chorister"
    }
    assert {"registry", "leader", "leader-worker", "helper", "helper-worker"} <= set(ours)
    for each in ours.values():
        check_command(each["command"])
    names = (name for each in ours.values() for name in each.get("environment", {}))
    assert check_settings(names) >= 4


def test_the_compose_files_parts_fit_together(compose: dict[str, Any]) -> None:
    for name, each in compose["services"].items():
        assert set(each["networks"]) <= set(compose["networks"]), name
        assert set(each.get("secrets", ())) <= set(compose["secrets"]), name
        assert set(each.get("depends_on", ())) <= set(compose["services"]), name
        named = {volume.partition(":")[0] for volume in each.get("volumes", ())}
        assert {each for each in named if not each.startswith(".")} <= set(compose["volumes"])
    # Neither operator reaches the other's database.
    services = compose["services"]
    for mine, other in (("leader", "helper"), ("helper", "leader")):
        theirs = set(services[f"{other}-database"]["networks"])
        for name in (mine, f"{mine}-worker"):
            assert not theirs & set(services[name]["networks"])


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_the_units_commands_exist(path: Path) -> None:
    lines = path.read_text().splitlines()
    (start,) = (line.removeprefix("ExecStart=") for line in lines if line.startswith("ExecStart="))
    program, *words = shlex.split(start)
    assert Path(program).name == "chorister"
    check_command(words)
    sections = [line for line in lines if line.startswith("[")]
    assert all(line.startswith(("[", "#")) or not line or "=" in line for line in lines)
    timer = path.with_suffix(".timer")
    if timer.exists():  # which starts it; systemd restarts no such unit for ever
        assert sections == ["[Unit]", "[Service]"]
        assert "Type=oneshot" in lines
        check_timer(timer)
    else:
        assert sections == ["[Unit]", "[Service]", "[Install]"]
        assert "Restart=always" in lines


def check_timer(path: Path) -> None:
    lines = path.read_text().splitlines()
    sections = [line for line in lines if line.startswith("[")]
    assert sections == ["[Unit]", "[Timer]", "[Install]"]
    assert "Persistent=true" in lines  # a machine that was off catches up
    assert any(line.startswith("OnCalendar=") for line in lines)


def test_the_timer_needs_only_what_its_guide_creates() -> None:
    unit = (DEPLOY / "systemd" / "chorister-collect.service").read_text()
    assert re.findall(r"[\w-]+\.toml", unit.partition("ExecStart=")[2].partition("\n")[0]) == [
        "profile.toml"
    ]
    guide = (ROOT / "docs" / "howto" / "watch-a-series.md").read_text()
    for text in (unit, guide):
        (options,) = re.findall('COLLECT_OPTIONS="(.*?)"', text)
        check_command(["collect", *shlex.split(options)])


def test_there_is_a_unit_for_every_role() -> None:
    roles = ("leader", "helper", "registry", "worker@", "collect")
    assert {path.name for path in UNITS} == {f"chorister-{role}.service" for role in roles}


def test_the_image_starts_our_command() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    instructions = re.findall(r"^([A-Z]+) ", text, flags=re.MULTILINE)
    assert set(instructions) <= {"FROM", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}
    assert 'ENTRYPOINT ["chorister"]' in text
    assert re.search(r"^USER chorister$", text, flags=re.MULTILINE)  # never root
    for source in re.findall(r"^COPY ([\w.]+) ", text, flags=re.MULTILINE):
        assert (ROOT / source).exists()


# --- what operators watch -----------------------------------------------------------------------


def known_metrics() -> set[str]:
    found = set()
    for family in Metrics().registry.collect():
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
        found |= {family.name + suffix for suffix in suffixes.get(family.type, ("",))}
    return found


def named_metrics(text: str) -> set[str]:
    return set(re.findall(r"\bchorister_\w+", text))


def test_the_dashboards_metrics_exist() -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    named = set()
    for panel in dashboard["panels"]:
        expressions = [target["expr"] for target in panel["targets"]]
        assert expressions, panel["title"]
        for each in expressions:
            assert named_metrics(each), panel["title"]
            named |= named_metrics(each)
    assert named <= known_metrics()
    # All that is counted is drawn.
    families = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in known_metrics()}
    assert {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in named} == families


def test_the_alerts_metrics_exist() -> None:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    alerts = {rule["alert"]: rule for rule in group["rules"]}
    wanted = {"JobsStuck", "DeadJobs", "Rejections", "ClockSkew", "KeyExpires"}
    assert {f"Chorister{name}" for name in wanted} <= set(alerts)
    for name, rule in alerts.items():
        assert named_metrics(rule["expr"]) <= known_metrics(), name
        assert named_metrics(rule["expr"]) or rule["expr"].startswith("up{"), name
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["look"]
        assert rule["expr"].count("(") == rule["expr"].count(")")
        for command in re.findall(r"`chorister ([^`]+)`", rule["annotations"]["look"]):
            words = [word for word in command.split() if word != "TASK"]
            check_command(words)


def test_the_reference_lists_every_metric() -> None:
    page = (ROOT / "docs" / "reference" / "aggregator.md").read_text()
    written = {re.sub(r"_total$", "", name) for name in named_metrics(page)}
    counted = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in known_metrics()}
    assert counted <= written


# --- the guide ----------------------------------------------------------------------------------


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def test_the_guides_settings_are_accepted(tmp_path: Path) -> None:
    *found, registry = blocks("toml")
    assert RegistryConfig.model_validate(tomllib.loads(registry)).origin
    assert len(found) == 2
    for text, model in zip(found, (LeaderConfig, HelperConfig), strict=True):
        path = tmp_path / "settings.toml"
        path.write_text(text)
        config = load_config(path, {})
        assert isinstance(config, model)
        assert config.workers
        assert config.tls_certificate is not None


def test_the_guides_commands_exist() -> None:
    lines = [line for text in blocks("text") for line in text.splitlines()]
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ chorister ")]
    assert len(commands) >= 8
    for line in commands:
        check_command(shlex.split(line)[1:])
    assert check_settings(iter(re.findall(r"CHORISTER_\w+", PAGE.read_text()))) >= 1


def test_the_guides_files_exist() -> None:
    for name in re.findall(r"`(deploy/[\w./@*-]+)`", PAGE.read_text()):
        assert list(ROOT.glob(name)), name
