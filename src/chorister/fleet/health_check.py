"""Checks of a deployment, each with a finding and what to do about it.

Nothing is changed, and no secret is shown. One failed check does not stop the others.
"""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import Final, Literal, TypeAlias
from urllib.parse import urlsplit

from chorister.aggregator.config import AggregatorConfig, HelperConfig, LeaderConfig, load_config
from chorister.aggregator.peers import check_peers, helper_tokens, leader_tokens, verify_keys
from chorister.canonical import b64url_encode
from chorister.clock import Clock, SystemClock
from chorister.device import Sandbox
from chorister.errors import ChoristerError
from chorister.fleet.deployment import Deployment
from chorister.fleet.supervisor import running_pid
from chorister.http_client import ERROR_BYTES, WebClient
from chorister.key_files import (
    read_collector_key,
    read_secret,
    read_signing_key,
    read_token,
    token_digest,
)
from chorister.policy import Policy
from chorister.registry.server import RegistryConfig
from chorister.transparency.checkpoint import MAX_SKEW

State: TypeAlias = Literal["good", "note", "bad"]
_NOTABLE_SKEW_SECONDS: Final = 5
_LOW_DISK_BYTES: Final = 500_000_000
_TIMEOUT_SECONDS: Final = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """The outcome of one check."""

    what: str
    state: State
    why: str
    remedy: str = ""


@dataclass(kw_only=True)
class HealthCheck:
    """Runs checks and collects their findings."""

    clock: Clock = field(default_factory=SystemClock)
    findings: list[CheckResult] = field(default_factory=list)

    def deployment(self, deployment: Deployment) -> None:
        """Check everything in a folder of `chorister up`."""
        for role in ("registry", "leader", "helper"):
            self.server(deployment.settings(role))
        self._pair(deployment.settings("leader"), deployment.settings("helper"))
        self._profile(deployment)
        if running_pid(deployment) is None:
            remedy = f"chorister up {deployment.folder}"
            self._bad("processes", "nothing is running in this folder", remedy)
        else:
            self._good("processes", "the deployment is running")
            why = deployment.why_not_ready()
            if why is None:
                self._good("log", "both aggregators have cosigned its newest checkpoint")
            else:
                remedy = f"see {deployment.log('leader')} and {deployment.log('helper')}"
                self._bad("log", f"devices can't use it: {why}", remedy)
        self._disk(deployment.folder)

    def server(self, path: Path) -> None:
        """Check a server's settings file and the files that it refers to."""
        what = f"{path.stem} settings"
        try:
            with path.open("rb") as file:
                is_registry = "role" not in tomllib.load(file)
        except OSError as error:
            self._bad(what, f"can't read {path}: {error.strerror}", "restore the file")
            return
        except (ValueError, RecursionError) as error:
            self._bad(what, f"{path}: {error}", "correct the TOML")
            return
        if is_registry:
            self._registry(path)
        else:
            self._aggregator(path)

    def sandbox(self) -> None:
        """Check what a query of a device on this machine could still do."""
        try:
            with Sandbox() as sandbox:
                weaknesses = sandbox.weaknesses()
        except ChoristerError as error:
            self._bad("sandbox", str(error), "devices on this machine can't answer")
            return
        for words in weaknesses:
            self._note(
                "sandbox", words, "use a kernel or container where the sandbox can prevent it"
            )
        if not weaknesses:
            self._good("sandbox", "queries can't reach the network, files or other processes")

    # --- Servers --------------------------------------------------------------------------------

    def _registry(self, path: Path) -> None:
        try:
            config = RegistryConfig.load(path)
        except ChoristerError as error:
            self._bad("registry settings", str(error), "see docs/reference/registry.md")
            return
        self._good("registry settings", f"log {config.origin}")
        for policy in self._policies("registry", lambda: config.read_policies().values()):
            self._key("registry key", Path(config.key), policy.log.keys, policy)
            if policy.log.origin != config.origin:
                why = f"policy {policy.name} names the log {policy.log.origin}, not {config.origin}"
                self._bad(
                    "registry origin", why, "a log never changes its name: correct the policy"
                )
        if not Path(config.folder).is_dir():
            remedy = "restore it; use --create only if there never was a log"
            self._bad("registry log", f"there is no folder {config.folder}", remedy)

    def _aggregator(self, path: Path) -> None:
        try:
            config = load_config(path)
        except ChoristerError as error:
            self._bad(f"{path.stem} settings", str(error), "see docs/reference/aggregator.md")
            return
        role = config.role
        self._good(f"{role} settings", config.url)
        policies = self._policies(role, config.read_policies)
        for policy in policies:
            self._in_policy(config, policy)
        self._secret(f"{role} at_rest_key", lambda: read_secret(config.at_rest_key))
        self._secret(f"{role} verify_key", lambda: verify_keys(config))
        if isinstance(config, LeaderConfig):
            self._secret("leader helper_token", lambda: helper_tokens(config))
        try:
            check_peers(config, policies)
        except ChoristerError as error:
            self._bad(f"{role} pairs", str(error), "see docs/reference/aggregator.md")
        if not Path(config.head).exists():
            remedy = "use --begin-log for the very first start, otherwise --adopt-checkpoint"
            self._note(
                f"{role} head", "nothing has been cosigned here yet, or the file was lost", remedy
            )
        registry = f"{config.registry.rstrip('/')}/status"
        self._reach(f"{role} to the registry", registry, config.ca_bundle)
        self._reach(f"{role} itself", _origin(config.url) + "/healthz", config.ca_bundle)
        for policy in policies if role == "leader" else ():
            for pair in policy.aggregators:
                if pair.leader.url == config.url:
                    helper = _origin(pair.helper.url) + "/healthz"
                    self._reach("leader to the helper", helper, config.ca_bundle)

    def _in_policy(self, config: AggregatorConfig, policy: Policy) -> None:
        sides = [
            side
            for pair in policy.aggregators
            for side in ((pair.leader,) if config.role == "leader" else (pair.helper,))
            if side.url == config.url
        ]
        what = f"{config.role} in the policy"
        if not sides:
            why = f"policy {policy.name} has no {config.role} {config.url}"
            self._bad(what, why, "correct `url`, or serve the policy that names this aggregator")
            return
        keys = tuple(key for side in sides for key in side.cosigning_keys)
        self._key(f"{config.role} cosigning_key", Path(config.cosigning_key), keys, policy)
        if any(pair.one_operator for pair in policy.aggregators):
            self._note(what, "one operator runs both aggregators: no protection against it")
        listed = {digest for each in policy.analyses.values() for digest in each.collectors}
        if missing := listed - {collector.digest.hex() for collector in config.collectors}:
            self._bad(
                f"{config.role} collectors",
                f"the policy lists the collector {min(missing)[:16]}…, but the settings do not, so "
                "its results can't be sealed",
                "add the analyst's hpke_config under [[collectors]]",
            )

    def _pair(self, leader_file: Path, helper_file: Path) -> None:
        """Compare the leader with the helper, which only works on one machine."""
        try:
            leader, helper = load_config(leader_file), load_config(helper_file)
            keys = verify_keys(leader)(helper.url), verify_keys(helper)(leader.url)
            if not isinstance(leader, LeaderConfig) or not isinstance(helper, HelperConfig):
                return  # reported above
            token = token_digest(helper_tokens(leader)(helper.url).encode())
        except ChoristerError:
            return  # reported above
        if keys[0] != keys[1]:
            remedy = "copy one verify_key to the other side; open tasks can't be finished"
            self._bad("verify_key", "leader and helper have different keys", remedy)
        is_valid_for = leader_tokens(helper).get(token)
        if is_valid_for is None or not is_valid_for(leader.url):
            why = "the helper does not accept the leader's token"
            self._bad("helper_token", why, "put the SHA-256 of the token into leader_token_digests")

    def _profile(self, deployment: Deployment) -> None:
        try:
            values = tomllib.loads(deployment.profile.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            self._bad("profile", f"{deployment.profile}: {error}", "restore the file")
            return
        folder = deployment.profile.parent
        authors = [key for each in deployment.policy.analyses.values() for key in each.author_keys]
        key = folder / str(values.get("author_key", "author.key"))
        self._key("analyst author_key", key, authors, deployment.policy)
        self._secret("analyst token", lambda: read_token(str(folder / str(values.get("token")))))
        collector_key = folder / str(values.get("collector_key"))
        self._secret("analyst collector_key", lambda: read_collector_key(collector_key))

    # --- Single checks --------------------------------------------------------------------------

    def _policies(self, role: str, read: Callable[[], Iterable[Policy]]) -> list[Policy]:
        try:
            found = list(read())
        except ChoristerError as error:
            self._bad(f"{role} policies", str(error), "see `chorister policy check`")
            return []
        self._good(f"{role} policies", ", ".join(policy.name for policy in found))
        return found

    def _key(self, what: str, path: Path, listed: Iterable[str], policy: Policy) -> None:
        try:
            public = read_signing_key(path).public_key().public_bytes_raw()
        except ChoristerError as error:
            self._bad(what, str(error), "restore it; a new key would have to be in every policy")
            return
        if b64url_encode(public) in listed:
            self._good(what, f"the policy {policy.name} lists it, and only its owner can read it")
        else:
            why = f"the policy {policy.name} does not list the key in {path}"
            self._bad(what, why, "use the key whose public half the policy lists")

    def _secret(self, what: str, read: Callable[[], object]) -> None:
        try:
            read()
        except ChoristerError as error:
            self._bad(what, str(error), "correct its permissions, or restore it from a backup")
        else:
            self._good(what, "present, and only its owner can read it")

    def _reach(self, what: str, url: str, ca_bundle: str | None) -> None:
        """Check whether a server answers, and its clock."""
        try:
            authorities = None if ca_bundle is None else Path(ca_bundle)
            web = WebClient(timeout=_TIMEOUT_SECONDS, ca_bundle=authorities)
            answer = web.exchange("GET", url, limit=ERROR_BYTES)
        except ChoristerError as error:
            remedy = "start it, or correct the URL, the firewall, the certificate or `ca_bundle`"
            self._bad(what, str(error), remedy)
            return
        if answer.status >= HTTPStatus.BAD_REQUEST:
            self._bad(what, f"{url} answers {answer.status}", "see its log")
            return
        self._good(what, f"{url} answers")
        self._skew(what, answer.headers.get("date"))

    def _skew(self, what: str, date: str | None) -> None:
        try:
            theirs = int(parsedate_to_datetime(date or "").timestamp())
        except (ValueError, TypeError):
            self._note(f"{what}: clock", "the server does not send its time")
            return
        skew = theirs - self.clock.now()
        if abs(skew) > MAX_SKEW:
            why = f"off by {skew:+} s; beyond {MAX_SKEW} s nothing is cosigned"
            self._bad(f"{what}: clock", why, "synchronize both clocks with NTP")
        elif abs(skew) > _NOTABLE_SKEW_SECONDS:
            self._note(f"{what}: clock", f"off by {skew:+} s", "synchronize both clocks with NTP")
        else:
            self._good(f"{what}: clock", f"off by {skew:+} s")

    def _disk(self, folder: Path) -> None:
        free = shutil.disk_usage(folder).free
        if free < _LOW_DISK_BYTES:
            why = f"{free / 1e6:,.0f} MB are free where {folder} is"
            self._note("disk", why, "free some space before databases can't be written")
        else:
            self._good("disk", f"{free / 1e9:,.0f} GB are free")

    # --- Findings -------------------------------------------------------------------------------

    def _good(self, what: str, why: str) -> None:
        self.findings.append(CheckResult(what=what, state="good", why=why))

    def _note(self, what: str, why: str, remedy: str = "") -> None:
        self.findings.append(CheckResult(what=what, state="note", why=why, remedy=remedy))

    def _bad(self, what: str, why: str, remedy: str) -> None:
        self.findings.append(CheckResult(what=what, state="bad", why=why, remedy=remedy))


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
