"""Installing: every role's guide starts from the wheel, operators start a registry and check it."""

from __future__ import annotations

import re

import pytest

from tests.conftest import REPOSITORY

HOWTO = REPOSITORY / "docs" / "howto"
ROLES = {
    "analyst": "rehearse.md",
    "app developer": "embed-a-device.md",
    "privacy officer": "write-a-policy.md",
    "operator": "run-a-pair.md",
    "operator on PostgreSQL": "two-operators.md",
}


@pytest.mark.parametrize("role", ROLES)
def test_each_role_starts_from_a_wheel(role: str) -> None:
    text = (HOWTO / ROLES[role]).read_text()
    wheel = text.index("make wheel")
    install = re.search(r"pip install .*chorister-\*\.whl", text)
    assert install is not None, role
    assert wheel < install.start()
    assert install.start() < 2_500  # at the beginning, not somewhere below
    assert "pip install 'chorister[" not in text  # there is no release on an index yet


@pytest.mark.parametrize("page", ["run-a-pair.md", "two-operators.md"])
def test_operators_start_a_registry_and_check_it(page: str) -> None:
    text = (HOWTO / page).read_text()
    registry = text.index("chorister serve registry --config registry.toml --create")
    leader = text.index("chorister serve leader")
    assert registry < leader  # an aggregator can't cosign a log that is not there
    assert "chorister doctor --config leader.toml" in text


def test_the_readme_names_the_supported_systems() -> None:
    text = (REPOSITORY / "README.md").read_text()
    assert "Linux (x86-64 and ARM64) with Python 3.11 to 3.13" in text
    assert "docs/howto/install.md" in text


def test_every_role_of_the_readme_is_on_the_page() -> None:
    page = (HOWTO / "install.md").read_text()
    for role in ("an analyst", "an app developer", "a privacy officer", "an operator"):
        assert f"| {role} |" in page
    project = (REPOSITORY / "pyproject.toml").read_text()
    for extras in re.findall(r"\| `([a-z,]+)` \|", page):
        for extra in extras.split(","):
            assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra
