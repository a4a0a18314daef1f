"""Settings: what is read, what overrides what, what is refused, and that all are documented."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.aggregator.config import (
    CollectorConfig,
    HelperConfig,
    HelperPeer,
    LeaderConfig,
    LeaderPeer,
    load_config,
)
from chorister.errors import ServiceError
from chorister.key_files import read_secret, read_token, write_private
from chorister.registry.server import RegistryConfig
from tests.aggregator.operators import TOKENS, Operators

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "aggregator.md"


@pytest.fixture
def operators(tmp_path: Path) -> Operators:
    return Operators(tmp_path)


def test_paths_are_relative_to_the_file(operators: Operators) -> None:
    config = operators.leader()
    assert config.database == f"sqlite:///{operators.folder}/leader.db"
    assert config.policies == (str(operators.folder / "policy.toml"),)
    assert config.helper_token == str(operators.folder / "helper.token")
    assert config.prefix == "/dap/"
    assert config.collectors[0].digest == operators.digest


def test_the_environment_overrides_the_file(operators: Operators) -> None:
    found = load_config(
        operators.settings("leader"),
        {
            "CHORISTER_LEADER__PORT": "9000",
            "CHORISTER_LEADER__DATABASE": "postgresql+psycopg://db/leader",
            "CHORISTER_LEADER__HPKE_LIFETIME": "7d",
            "CHORISTER_LEADER__UPLOAD_CREDENTIAL_DIGESTS": f"['{'0' * 64}']",
            "CHORISTER_LEADER__AT_REST_KEY": "env:SECRET",
            "CHORISTER_LEADER__RUN_JOBS": "false",
            "CHORISTER_HELPER__PORT": "1",
            "HOME": "/",
        },
    )
    assert isinstance(found, LeaderConfig)
    assert (found.port, found.hpke_lifetime, found.run_jobs) == (9000, 7 * 86_400, False)
    assert found.database == "postgresql+psycopg://db/leader"
    assert found.at_rest_key == "env:SECRET"
    assert found.upload_credential_digests == ("0" * 64,)


def test_a_setting_may_have_its_former_name(operators: Operators) -> None:
    settings = operators.settings("leader")
    settings.write_text(f"linger_milliseconds = 30\n{settings.read_text()}")
    found = load_config(settings, {})
    assert isinstance(found, LeaderConfig)
    assert found.batch_delay_milliseconds == 30
    for name in ("LINGER", "BATCH_DELAY"):
        found = load_config(settings, {f"CHORISTER_LEADER__{name}_MILLISECONDS": "40"})
        assert isinstance(found, LeaderConfig)
        assert found.batch_delay_milliseconds == 40
    settings.write_text(f"batch_delay_milliseconds = 50\n{settings.read_text()}")
    with pytest.raises(ServiceError, match="former name of batch_delay_milliseconds"):
        load_config(settings, {})


@pytest.mark.parametrize("name", ["PROT", "ROLE", "COLLECTORS__NAME"])
def test_an_override_that_is_no_setting_is_refused(operators: Operators, name: str) -> None:
    with pytest.raises(
        ServiceError, match=f"CHORISTER_HELPER__{name} is not a setting of a helper"
    ):
        load_config(operators.settings("helper"), {f"CHORISTER_HELPER__{name}": "1"})


@pytest.mark.parametrize(
    ("role", "changes", "message"),
    [
        ("leader", {"role": "registry"}, 'role must be "leader" or "helper"'),
        ("leader", {"colour": 1}, "colour: unknown field"),
        ("leader", {"port": 70_000}, "port"),
        ("leader", {"tls_key": "key.pem"}, "set both the certificate and its key"),
        ("leader", {"url": "http://leader.example.org/"}, "url"),
        ("leader", {"url": "https://leader.example.org/dap"}, "url"),
        ("leader", {"at_rest_key": "env:1x"}, "must be followed by the name"),
        ("leader", {"helper_token": "env:"}, "must be followed by the name"),
        ("leader", {"upload_credential": "nothing"}, "upload_credential"),
        (
            "leader",
            {"upload_credential": "a:b", "upload_credential_digests": ["0" * 64]},
            "a function or digests, not both",
        ),
        ("leader", {"leader_token_digests": ["0" * 64]}, "leader_token_digests: unknown field"),
        ("helper", {"leader_token_digests": []}, "leader_token_digests"),
        ("helper", {"leader_token_digests": ["leader"]}, "64 lower-case hexadecimal digits"),
        ("helper", {"hpke_lifetime": "soon"}, "a duration is a string"),
        ("helper", {"collectors": [{"name": "a", "hpke_config": "!"}]}, "not base64url"),
        (
            "helper",
            {
                "collectors": [
                    {"name": "a", "hpke_config": "AA"},
                    {"name": "b", "hpke_config": "AA"},
                ]
            },
            "an HPKE config is listed twice",
        ),
        ("helper", {"policies": []}, "policies"),
        (
            "leader",
            {"helpers": 2 * [{"url": "https://b.example/", "token": "b", "verify_key": "c"}]},
            "helpers: a URL is listed twice",
        ),
        (
            "leader",
            {"helpers": [{"url": "https://b.example/", "token": "env:", "verify_key": "c"}]},
            "must be followed by the name",
        ),
        (
            "helper",
            {
                "leaders": [
                    {
                        "url": f"https://{name}.example/",
                        "token_digests": ["0" * 64],
                        "verify_key": name,
                    }
                    for name in "bc"
                ]
            },
            "leaders: a token digest is listed twice",
        ),
        ("helper", {"database": None}, "database: this field is missing"),
    ],
)
def test_wrong_settings(tmp_path: Path, role: str, changes: dict[str, Any], message: str) -> None:
    operators = Operators(tmp_path, settings={role: changes})
    with pytest.raises(ServiceError, match=re.escape(message)):
        load_config(operators.settings(role), {})


def test_unreadable_files(operators: Operators, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    for data in (b"role = ", b"\xff", b"role = 'leader'\nx = " + b"[" * 9999):
        path.write_bytes(data)
        with pytest.raises(ServiceError, match=re.escape(str(path))):
            load_config(path, {})
    with pytest.raises(ServiceError, match="can't read"):
        load_config(tmp_path / "none.toml", {})


@given(st.binary(max_size=200))
def test_no_file_is_more_than_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(b'role = "helper"\n' + data)
    with pytest.raises(ServiceError):
        load_config(path, {})


def test_secrets_come_from_files_or_the_environment(operators: Operators) -> None:
    path = operators.folder / "at-rest.key"
    assert read_secret(str(path)) == bytes(range(32))
    text = path.read_text()
    assert read_secret("env:KEY", {"KEY": text}) == bytes(range(32))
    assert read_token(operators.leader().helper_token) == TOKENS["leader"]
    with pytest.raises(ServiceError, match="KEY is not set"):
        read_secret("env:KEY", {})
    path.chmod(0o640)
    with pytest.raises(ServiceError, match="others can read"):
        read_secret(str(path))
    with pytest.raises(ServiceError, match="chorister keygen"):
        read_secret(str(path.parent / "none"))


@pytest.mark.parametrize("text", ["", "short", "A" * 42, "A" * 44, "not base64url!" * 4])
def test_a_wrong_secret_is_not_quoted(text: str) -> None:
    with pytest.raises(ServiceError) as caught:
        read_secret("env:KEY", {"KEY": text})
    assert not text or text not in str(caught.value)


def test_a_key_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_private(path, b"one")
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ServiceError, match="are never overwritten"):
        write_private(path, b"two")
    assert path.read_bytes() == b"one"
    with pytest.raises(ServiceError, match="can't write"):
        write_private(tmp_path / "none" / "key", b"")


# --- the reference page -------------------------------------------------------------------------


def documented(title: str) -> dict[str, str]:
    """Setting -> default, of the table under a heading."""
    section = PAGE.read_text().split(f"\n### {title}\n")[1].split("\n#")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section, flags=re.MULTILINE)
    return {name: default.strip() for name, default in rows}


def shown(default: object) -> str:
    """A default as the page writes it."""
    if default is None or default == ():
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int):
        return f"{default:,}"
    return f"`{default}`"


@pytest.mark.parametrize(
    ("title", "model", "base"),
    [
        ("Both", LeaderConfig, HelperConfig),
        ("Leader", LeaderConfig, None),
        ("Helper", HelperConfig, None),
        ("Collectors", CollectorConfig, None),
        ("Further helpers", HelperPeer, None),
        ("Further leaders", LeaderPeer, None),
    ],
)
def test_every_setting_is_documented(title: str, model: Any, base: Any) -> None:
    both = set(LeaderConfig.model_fields) & set(HelperConfig.model_fields)
    if base is not None:
        wanted = both
    elif model not in (LeaderConfig, HelperConfig):
        wanted = set(model.model_fields)
    else:
        wanted = set(model.model_fields) - both
    rows = documented(title)
    assert set(rows) == wanted
    for name in wanted:
        field = model.model_fields[name]
        expected = "required" if field.is_required() else shown(field.default)
        assert rows[name] == expected, name


def test_the_guides_settings_are_accepted(tmp_path: Path) -> None:
    page = (PAGE.parents[1] / "howto" / "run-a-pair.md").read_text()
    found = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    registry, *found = found
    assert RegistryConfig.model_validate(tomllib.loads(registry)).origin
    assert len(found) == 2
    for text, model in zip(found, (LeaderConfig, HelperConfig), strict=True):
        path = tmp_path / "settings.toml"
        path.write_text(text)
        assert isinstance(load_config(path, {}), model)
