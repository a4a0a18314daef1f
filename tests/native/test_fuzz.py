"""Random and mutated bytes into every decoder: a typed error or a rejected report, never more."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorister._native import (
    HPKEKeypair,
    Prio3,
    hpke_seal,
    scan_reports,
    scan_verify_inits,
)
from chorister.errors import ChoristerError, InternalError
from tests.native.pair import NativePair, one_hots

PAIR = NativePair(Prio3.multihot_count_vec(9, 3))
REPORTS = b"".join(PAIR.reports(one_hots(9, 2)))
JOB = PAIR.lead(REPORTS)
RESPS, HELPED = PAIR.help(JOB.verify_inits)

DECODERS: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "scan_reports": (scan_reports, REPORTS),
    "scan_verify_inits": (scan_verify_inits, JOB.verify_inits),
    "leader_initialize": (PAIR.lead, REPORTS),
    "helper_initialize": (PAIR.help, JOB.verify_inits),
    "finish": (lambda answer: PAIR.lead(REPORTS).finish(answer), RESPS),
    "merge": (lambda share: PAIR.vdaf.merge([share]), HELPED.share),
    "add_counts": (lambda share: PAIR.vdaf.add_counts(share, np.ones(9, np.uint8)), HELPED.share),
    "unshard": (lambda share: PAIR.vdaf.unshard(share, share, count=2), HELPED.share),
    "open": (
        lambda sealed: PAIR.leader.open(sealed, b"", b""),
        hpke_seal(PAIR.leader.config, b"", b"", b"secret"),
    ),
    "config": (lambda config: hpke_seal(config, b"", b"", b""), PAIR.leader.config),
    "private key": (
        lambda key: HPKEKeypair.from_bytes(1, PAIR.leader.public_key, key),
        PAIR.leader.private_key(),
    ),
    "public key": (
        lambda key: HPKEKeypair.from_bytes(1, key, PAIR.leader.private_key()),
        PAIR.leader.public_key,
    ),
}


@st.composite
def mutated(draw: st.DrawFn, original: bytes) -> bytes:
    """The original with some bytes changed, cut out, doubled or put in."""
    content = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = draw(st.integers(start, min(len(content), start + 40)))
        content[start:end] = draw(
            st.one_of(st.binary(max_size=40), st.just(content[start:end] * 2))
        )
    return bytes(content)


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=150)
@given(data=st.data())
def test_only_typed_errors_come_out(name: str, data: st.DataObject) -> None:
    decode, valid = DECODERS[name]
    content = data.draw(st.one_of(st.binary(max_size=400), mutated(valid)))
    try:
        decode(content)
    except ChoristerError as error:
        assert not isinstance(error, InternalError)


@pytest.mark.parametrize("name", DECODERS)
def test_the_originals_are_accepted(name: str) -> None:
    decode, valid = DECODERS[name]
    if name == "unshard":
        assert (
            np.frombuffer(
                PAIR.vdaf.unshard(PAIR.lead(REPORTS).finish(RESPS).share, valid, count=2), np.uint64
            ).sum()
            == 2
        )
    else:
        decode(valid)


@settings(max_examples=100)
@given(st.data())
def test_a_mutated_batch_adds_only_whole_reports(data: st.DataObject) -> None:
    """Whatever a batch becomes, the sum is that of reports which were honestly made."""
    content = data.draw(mutated(REPORTS))
    try:
        job = PAIR.lead(content)
        verify_resps, helped = PAIR.help(job.verify_inits)
        led = job.finish(verify_resps)
    except ChoristerError:
        return
    result = PAIR.result(led, helped).tolist()
    assert led.count == helped.count <= 2
    assert result[2:] == [0] * 7
    assert sum(result) == led.count
