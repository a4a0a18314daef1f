"""The secrets that an aggregator shares with others: one verify key and one token for each pair.

A leader may have several helpers, and a helper several leaders. Whoever knows a pair's verify key
can make reports that pass its verification, and whoever has its token can ask the helper for its
work. So no two pairs share either: the first is that of the top level of the settings, the others
are listed under `[[helpers]]` or `[[leaders]]`.
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
    """Which secret is shared with the aggregator at a URL (taskprov's `verify_key_init`)."""
    listed = {peer.url: read_secret(peer.verify_key) for peer in config.peers}
    return _by_url("verify_key", read_secret(config.verify_key), listed)


def helper_tokens(config: LeaderConfig) -> Callable[[str], str]:
    """Which token proves a leader to the helper at a URL."""
    listed = {peer.url: read_token(peer.token) for peer in config.helpers}
    return _by_url("token", read_token(config.helper_token), listed)


def leader_tokens(config: HelperConfig) -> dict[bytes, Callable[[str], bool]]:
    """The tokens of leaders by their digests, each with the leaders' URLs for which it is good."""
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
            f"two pairs have the same {what}; make one for each pair with `chorister keygen`"
        )
    return lambda url: listed.get(url, first)
