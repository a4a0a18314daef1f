"""The published VDAF vectors through the byte interface: everything but sharding.

Sharding needs the vectors' fixed randomness, which the native module does not take on purpose; the
Rust tests do that, and the vectors for more than two aggregators.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chorister._native import Prio3, ReportError, hpke_seal
from tests.native.pair import (
    HELPER_INFO,
    LEADER_INFO,
    NativePair,
    header,
    opaque16,
    opaque32,
)

TWO_AGGREGATORS = [
    "Prio3Count_0",
    "Prio3Count_2",
    "Prio3Count_bad_gadget_poly",
    "Prio3Count_bad_helper_seed",
    "Prio3Count_bad_meas_share",
    "Prio3Count_bad_wire_seed",
    "Prio3Histogram_0",
    "Prio3Histogram_2",
    "Prio3Histogram_bad_helper_jr_blind",
    "Prio3Histogram_bad_leader_jr_blind",
    "Prio3Histogram_bad_public_share",
    "Prio3Histogram_bad_verifier_message",
    "Prio3MultihotCountVec_0",
    "Prio3MultihotCountVec_2",
    "Prio3SumVec_0",
    "Prio3Sum_0",
    "Prio3Sum_2",
]


def instance(name: str, vector: dict[str, Any]) -> Prio3:
    kind = name.split("_")[0].removeprefix("Prio3")
    chunk = vector.get("chunk_length")
    match kind:
        case "Count":
            return Prio3.count()
        case "Sum":
            return Prio3.sum(vector["max_measurement"])
        case "SumVec":
            return Prio3.sum_vec(vector["length"], vector["max_measurement"], chunk_length=chunk)
        case "Histogram":
            return Prio3.histogram(vector["length"], chunk_length=chunk)
        case "MultihotCountVec":
            return Prio3.multihot_count_vec(
                vector["length"], vector["max_weight"], chunk_length=chunk
            )
    raise ValueError(kind)


def sealed_report(pair: NativePair, report: dict[str, Any], report_id: bytes) -> bytes:
    start = header(report_id, bytes.fromhex(report["public_share"]))
    shares = [opaque16(b"") + opaque32(bytes.fromhex(share)) for share in report["input_shares"]]
    return (
        start
        + hpke_seal(pair.leader.config, LEADER_INFO, pair.aad + start, shares[0])
        + hpke_seal(pair.helper.config, HELPER_INFO, pair.aad + start, shares[1])
    )


def test_every_vector_for_two_aggregators_is_here(shared: Path) -> None:
    vectors = {path.stem: path for path in (shared / "vectors" / "vdaf").glob("*.json")}
    here = [
        name
        for name, path in vectors.items()
        if json.loads(path.read_text())["shares"] == 2 and "Multiproof" not in name
    ]
    assert sorted(here) == sorted(TWO_AGGREGATORS)


@pytest.mark.parametrize("name", TWO_AGGREGATORS)
def test_vector(name: str, shared: Path) -> None:
    vector = json.loads((shared / "vectors" / "vdaf" / f"{name}.json").read_text())
    pair = NativePair(
        instance(name, vector),
        context=bytes.fromhex(vector["ctx"]),
        verify_key=bytes.fromhex(vector["verify_key"]),
    )
    failing = [operation for operation in vector["operations"] if not operation["success"]]
    assert len(failing) == ("bad" in name)
    led_shares, helped_shares = [], []
    # The vectors' reports share one nonce, and a job may not hold a report twice: one job each.
    for report in vector["reports"]:
        report_id = bytes.fromhex(report["nonce"])
        job = pair.lead(sealed_report(pair, report, report_id))
        assert job.errors == b"\0"
        leader_message = b"\0" + opaque32(bytes.fromhex(report["verifier_shares"][0][0]))
        assert job.verify_inits.endswith(opaque32(leader_message))

        if failing and failing[0]["operation"] == "verify_next":
            # The helper's message is the vector's, which the leader has to see through.
            answer = opaque32(b"\2" + opaque32(bytes.fromhex(report["verifier_messages"][0])))
            led = job.finish(report_id + b"\0" + answer)
            assert (led.count, led.errors) == (0, bytes([ReportError.VDAF_VERIFY_ERROR]))
            continue
        verify_resps, helped = pair.help(job.verify_inits)
        led = job.finish(verify_resps)
        if failing:
            assert verify_resps == report_id + bytes([2, ReportError.VDAF_VERIFY_ERROR])
            assert led.errors == helped.errors == bytes([ReportError.VDAF_VERIFY_ERROR])
            assert led.share == helped.share == pair.vdaf.zero()
            continue
        message = b"\2" + opaque32(bytes.fromhex(report["verifier_messages"][0]))
        assert verify_resps == report_id + b"\0" + opaque32(message)
        assert [led.share.hex(), helped.share.hex()] == report_out_shares(report)
        led_shares.append(led.share)
        helped_shares.append(helped.share)

    if not failing:
        totals = [pair.vdaf.merge(led_shares), pair.vdaf.merge(helped_shares)]
        assert [total.hex() for total in totals] == vector["agg_shares"]
        result = pair.vdaf.unshard(totals[0], totals[1], count=len(vector["reports"]))
        expected = vector["agg_result"]
        assert np.frombuffer(result, np.uint64).tolist() == (
            expected if isinstance(expected, list) else [expected]
        )


def report_out_shares(report: dict[str, Any]) -> list[str]:
    """Output shares as the vectors have them: one string a share, or a list of field elements."""
    return ["".join(share) if isinstance(share, list) else share for share in report["out_shares"]]
