"""The secrets that an aggregator shares with others: one verify key and one token for each pair.

A leader may have several helpers, and a helper several leaders. With a pair's verify key, anybody
can make reports that pass its verification, and with its token, anybody can send requests to the
helper. So no two pairs share either. Those of one pair are at the top level of the settings, those
of the others under `[[helpers]]` or `[[leaders]]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import eq
from typing import TypeVar

from chorister.aggregator.config import HelperConfig, LeaderConfig
from chorister.errors import ServiceError
from chorister.key_files import read_secret, read_token
from chorister.policy import Policy

T = TypeVar("T", bytes, str)


def check_peers(config: LeaderConfig | HelperConfig, policies: Iterable[Policy]) -> None:
    """Raise if the policies pair this aggregator with more than one that is not listed."""
    listed = {peer.url for peer in config.peers}
    unlisted = sorted(_paired(config, policies) - listed)
    if len(unlisted) < 2:
        return
    if isinstance(config, LeaderConfig):
        kind, top = "helpers", "helper_token and verify_key are"
    else:
        kind, top = "leaders", "leader_token_digests and verify_key are"
    raise ServiceError(
        f"the policies pair this {config.role} with the {kind} {', '.join(unlisted)}, and {top} "
        f"for one of them; list the others under [[{kind}]], each with a verify key and a token "
        "of its own (docs/reference/aggregator.md)"
    )


def _paired(config: LeaderConfig | HelperConfig, policies: Iterable[Policy]) -> set[str]:
    pairs = [pair for policy in policies for pair in policy.aggregators]
    if isinstance(config, LeaderConfig):
        return {pair.helper.url for pair in pairs if pair.leader.url == config.url}
    return {pair.leader.url for pair in pairs if pair.helper.url == config.url}


def verify_keys(config: LeaderConfig | HelperConfig) -> Callable[[str], bytes]:
    """Map another aggregator's URL to the secret shared with it (taskprov's `verify_key_init`)."""
    listed = {peer.url: read_secret(peer.verify_key) for peer in config.peers}
    return _by_url("verify_key", read_secret(config.verify_key), listed)


def helper_tokens(config: LeaderConfig) -> Callable[[str], str]:
    """Map a helper's URL to the token that authenticates this leader."""
    listed = {peer.url: read_token(peer.token) for peer in config.helpers}
    return _by_url("token", read_token(config.helper_token), listed)


def leader_tokens(config: HelperConfig) -> dict[bytes, Callable[[str], bool]]:
    """Map the digest of each leader's token to a check of the URLs it is valid for."""
    listed = {peer.url for peer in config.leaders}
    found: dict[bytes, Callable[[str], bool]] = {
        bytes.fromhex(digest): lambda url: url not in listed
        for digest in config.leader_token_digests
    }
    for peer in config.leaders:
        found |= {bytes.fromhex(digest): partial(eq, peer.url) for digest in peer.token_digests}
    return found


def _by_url(what: str, first: T, listed: Mapping[str, T]) -> Callable[[str], T]:
    if len({first, *listed.values()}) <= len(listed):
        raise ServiceError(
            f"two pairs have the same {what}; create one for each pair with `chorister keygen`"
        )
    return lambda url: listed.get(url, first)
