"""Aggregation jobs: exact sums, and nothing of a bad report in them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import threading
import time
from functools import reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorister._native import (
    Prio3,
    ReportError,
    TaskBinding,
    hpke_seal,
    scan_reports,
    scan_verify_inits,
)
from chorister.errors import DecodeError, InvalidInput
from tests.native.pair import (
    HELPER_INFO,
    LEADER_INFO,
    NativePair,
    header,
    one_hots,
    opaque16,
    opaque32,
)

LENGTHS = sorted({1, 2} | {2**k + d for k in range(2, 11) for d in (-1, 0, 1)})
BOUNDED = NativePair(Prio3.multihot_count_vec(20, 5))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", ["bounded", "plain"])
def test_sums_are_exact_at_every_length(length: int, kind: str) -> None:
    weight = min(3, length)
    bounded = kind == "bounded"
    vdaf = Prio3.multihot_count_vec(length, weight) if bounded else Prio3.sum_vec(length, 1)
    pair = NativePair(vdaf)
    measurements = one_hots(length, 5, weight=weight)
    led, helped = pair.run(b"".join(pair.reports(measurements)))
    assert led.errors == helped.errors == bytes(5)
    assert led.count == helped.count == 5
    assert pair.result(led, helped).tolist() == measurements.sum(axis=0).tolist()


def test_pieces_are_one_job() -> None:
    """A leader's database returns a job's reports in pieces."""
    reports = BOUNDED.reports(one_hots(20, 6))
    whole = BOUNDED.lead(b"".join(reports))
    pieces = [b"".join(reports[:1]), b"", b"".join(reports[1:4]), b"".join(reports[4:])]
    job = BOUNDED.lead(pieces)
    assert (job.verify_inits, job.errors) == (whole.verify_inits, whole.errors)
    assert BOUNDED.lead([]).errors == b""


def test_a_report_never_spans_two_pieces() -> None:
    report = BOUNDED.reports(one_hots(20, 1))[0]
    for cut in (1, 20, len(report) - 1):
        with pytest.raises(DecodeError):
            BOUNDED.lead([report[:cut], report[cut:]])


@pytest.mark.parametrize("wrong", ["text", [b"", "text"], 7, None, bytearray(3)])
def test_reports_are_bytes(wrong: object) -> None:
    with pytest.raises(TypeError):
        BOUNDED.lead(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("threads", [0, 1, 2, 3, 64])
def test_the_number_of_threads_changes_nothing(threads: int) -> None:
    measurements = one_hots(20, 53, weight=4)
    reports = b"".join(BOUNDED.reports(measurements, threads=threads))
    led, helped = BOUNDED.run(reports, threads=threads)
    assert BOUNDED.result(led, helped).tolist() == measurements.sum(axis=0).tolist()
    single, _ = BOUNDED.run(reports, threads=1)
    assert (single.share, single.checksum) == (led.share, led.checksum)


def test_the_checksum_is_the_xor_of_hashed_ids() -> None:
    reports = b"".join(BOUNDED.reports(one_hots(20, 6)))
    led, helped = BOUNDED.run(reports)
    ids = scan_reports(reports).ids
    hashes = [hashlib.sha256(ids[i : i + 16]).digest() for i in range(0, len(ids), 16)]
    xor = reduce(lambda a, b: bytes(x ^ y for x, y in zip(a, b, strict=True)), hashes)
    assert led.checksum == helped.checksum == xor


def test_an_empty_job_adds_nothing() -> None:
    led, helped = BOUNDED.run(b"")
    assert (led.count, helped.count) == (0, 0)
    assert led.share == helped.share == BOUNDED.vdaf.zero()


@settings(max_examples=300)
@given(st.data())
def test_a_tampered_report_never_reaches_the_sum(data: st.DataObject) -> None:
    measurements = one_hots(20, 3, weight=2)
    reports = BOUNDED.reports(measurements)
    victim = bytearray(reports[1])
    place = data.draw(st.integers(0, len(victim) - 1), label="place")
    victim[place] ^= data.draw(st.integers(1, 255), label="mask")
    try:
        led, helped = BOUNDED.run(b"".join([reports[0], bytes(victim), reports[2]]))
    except DecodeError:
        return  # The framing broke; an upload with such a body is refused as a whole.
    assert led.errors[1] != 0
    assert led.errors[0::2] == b"\0\0"
    assert led.count == helped.count == 2
    assert led.checksum == helped.checksum
    expected = measurements[0] + measurements[2]
    assert BOUNDED.result(led, helped).tolist() == expected.tolist()


@settings(max_examples=200)
@given(st.data())
def test_a_tampered_leader_message_never_reaches_the_sum(data: st.DataObject) -> None:
    """A network attacker, or a leader that lies about one report."""
    reports = BOUNDED.reports(one_hots(20, 2))
    job = BOUNDED.lead(b"".join(reports))
    inits = bytearray(job.verify_inits)
    first = int(np.frombuffer(scan_verify_inits(bytes(inits)).ends, np.uint64)[0])
    place = data.draw(st.integers(first, len(inits) - 1), label="place")
    inits[place] ^= data.draw(st.integers(1, 255), label="mask")
    try:
        verify_resps, helped = BOUNDED.help(bytes(inits))
    except DecodeError:
        return
    assert helped.count == 1
    assert helped.errors[0] == 0
    assert helped.errors[1] != 0
    if place >= first + 16:  # The id is whole, so the answer still fits the job.
        led = job.finish(verify_resps)
        assert (led.count, led.errors) == (1, helped.errors)
    else:
        with pytest.raises(DecodeError, match="not the job's reports"):
            job.finish(verify_resps)


@pytest.mark.parametrize("what", ["context", "aad", "verify_key"])
def test_aggregators_that_differ_add_nothing(what: str) -> None:
    reports = b"".join(BOUNDED.reports(one_hots(20, 3)))
    job = BOUNDED.lead(reports)
    fields = {name: getattr(BOUNDED, name) for name in NativePair.__dataclass_fields__}
    other = NativePair(**fields | {what: os.urandom(32)})
    verify_resps, helped = other.help(job.verify_inits)
    expected = ReportError.HPKE_DECRYPT_ERROR if what == "aad" else ReportError.VDAF_VERIFY_ERROR
    assert helped.errors == bytes([expected] * 3)
    assert helped.share == BOUNDED.vdaf.zero()
    led = job.finish(verify_resps)
    assert (led.count, led.share, led.errors) == (0, BOUNDED.vdaf.zero(), helped.errors)


@pytest.mark.parametrize("weight", [1, 2, 3, 4, 6, 7, 8])
def test_weight_w_is_accepted_and_w_plus_one_rejected(weight: int) -> None:
    pair = NativePair(Prio3.multihot_count_vec(20, weight))
    led, helped = pair.run(b"".join(pair.reports(one_hots(20, 2, weight=weight))))
    assert led.count == helped.count == 2
    with pytest.raises(InvalidInput, match="weight"):
        pair.reports(one_hots(20, 1, weight=weight + 1))

    # A hostile client shards under a bound of its own, and seals to the same task.
    hostile = NativePair(
        Prio3.multihot_count_vec(20, weight + 1, chunk_length=pair.vdaf.chunk_length),
        verify_key=pair.verify_key,
        leader=pair.leader,
        helper=pair.helper,
    )
    led, helped = pair.run(b"".join(hostile.reports(one_hots(20, 2, weight=weight + 1))))
    assert led.count == helped.count == 0
    assert set(led.errors) <= {ReportError.VDAF_VERIFY_ERROR, ReportError.INVALID_MESSAGE}
    assert led.share == pair.vdaf.zero()


def test_a_plain_report_never_adds_more_than_its_maximum() -> None:
    """The encoding has no code for more: bits made for 3 read as 2 where 2 is the maximum."""
    pair = NativePair(Prio3.sum_vec(8, 2))
    hostile = NativePair(
        Prio3.sum_vec(8, 3), verify_key=pair.verify_key, leader=pair.leader, helper=pair.helper
    )
    led, helped = pair.run(b"".join(hostile.reports(np.full((1, 8), 3, np.uint8))))
    assert pair.result(led, helped).tolist() == [2] * 8


def test_shares_of_two_reports_do_not_mix() -> None:
    """Leader and helper share swapped between reports: the associated data tells."""
    a, b = BOUNDED.reports(one_hots(20, 2))
    cut = len(a) - len(b"\x02" + opaque16(bytes(32)) + opaque32(bytes(2 + 4 + 64 + 16)))
    led, helped = BOUNDED.run(a[:cut] + b[cut:])
    assert led.errors == helped.errors == bytes([ReportError.HPKE_DECRYPT_ERROR])


def test_reports_that_the_caller_rejected_stay_out() -> None:
    measurements = one_hots(20, 4)
    reports = b"".join(BOUNDED.reports(measurements))
    job = BOUNDED.lead(reports, rejected=bytes([0, ReportError.REPORT_REPLAYED, 0, 0]))
    assert job.errors == bytes([0, ReportError.REPORT_REPLAYED, 0, 0])
    assert scan_verify_inits(job.verify_inits).count == 3
    verify_resps, helped = BOUNDED.help(
        job.verify_inits, rejected=bytes([0, 0, ReportError.REPORT_REPLAYED])
    )
    led = job.finish(verify_resps)
    assert led.errors == bytes([0, ReportError.REPORT_REPLAYED, 0, ReportError.REPORT_REPLAYED])
    expected = measurements[0] + measurements[2]
    assert BOUNDED.result(led, helped).tolist() == expected.tolist()


def test_the_codes_that_are_accepted_are_those_that_python_imports() -> None:
    report = b"".join(BOUNDED.reports(one_hots(20, 1)))
    accepted = set()
    for code in range(1, 256):
        with contextlib.suppress(InvalidInput):
            assert BOUNDED.lead(report, rejected=bytes([code])).errors == bytes([code])
            accepted.add(code)
    assert accepted == set(ReportError)


@pytest.mark.parametrize("rejected", [b"", bytes(3), b"\x63\x00"])
def test_codes_that_do_not_fit_the_job_are_refused(rejected: bytes) -> None:
    reports = b"".join(BOUNDED.reports(one_hots(20, 2)))
    with pytest.raises(InvalidInput, match="rejected has"):
        BOUNDED.lead(reports, rejected=rejected)


def test_an_unknown_key_is_a_decryption_error() -> None:
    """Section 4.6.3.3 of the draft gives an unknown configuration this code."""
    reports = b"".join(BOUNDED.reports(one_hots(20, 2)))
    job = BOUNDED.task.leader_initialize(BOUNDED.verify_key, [BOUNDED.helper], reports)
    assert job.errors == bytes([ReportError.HPKE_DECRYPT_ERROR] * 2)


@pytest.mark.parametrize("private", [False, True])
def test_extensions_are_not_known_here(private: bool) -> None:
    extension = (0x1234).to_bytes(2, "big") + opaque16(b"x")
    report_id = os.urandom(16)
    public, leader, helper = BOUNDED.vdaf.shard(BOUNDED.context, one_hots(20, 1)[0], report_id)
    start = header(report_id, public, extensions=b"" if private else extension)
    plaintext = opaque16(extension if private else b"") + opaque32(leader)
    report = start + hpke_seal(BOUNDED.leader.config, LEADER_INFO, BOUNDED.aad + start, plaintext)
    plaintext = opaque16(b"") + opaque32(helper)
    report += hpke_seal(BOUNDED.helper.config, HELPER_INFO, BOUNDED.aad + start, plaintext)
    assert scan_reports(report).extensions == bytes([not private])
    assert BOUNDED.lead(report).errors == bytes([ReportError.INVALID_MESSAGE])


def test_a_job_with_one_report_twice_is_refused() -> None:
    (report,) = BOUNDED.reports(one_hots(20, 1))
    job = BOUNDED.lead(report)
    with pytest.raises(DecodeError, match="same report id"):
        BOUNDED.help(job.verify_inits * 2)


def test_an_answer_of_another_job_is_refused_and_the_job_waits_on() -> None:
    reports = BOUNDED.reports(one_hots(20, 2))
    job, other = BOUNDED.lead(b"".join(reports)), BOUNDED.lead(b"".join(reversed(reports)))
    swapped, _ = BOUNDED.help(other.verify_inits)
    right, _ = BOUNDED.help(job.verify_inits)
    for answer in (swapped, right[: len(right) // 2], b"", right + right):
        with pytest.raises(DecodeError, match="not the job's reports"):
            job.finish(answer)
    with pytest.raises(DecodeError, match="response type 1"):
        job.finish(right[:16] + b"\1" + right[17:])
    assert job.finish(right).count == 2
    with pytest.raises(InvalidInput, match="finished before"):
        job.finish(right)


def test_headers_are_columns() -> None:
    reports = BOUNDED.reports(one_hots(20, 3))
    headers = scan_reports(b"".join(reports))
    assert headers.count == 3
    assert headers.ids == b"".join(report[:16] for report in reports)
    assert np.frombuffer(headers.times, np.uint64).tolist() == [7, 7, 7]
    assert headers.config_ids == b"\1\1\1"
    ends = np.frombuffer(headers.ends, np.uint64)
    assert ends.tolist() == np.cumsum([len(report) for report in reports]).tolist()


def test_other_python_threads_run_while_a_job_does() -> None:
    pair = NativePair(Prio3.multihot_count_vec(1000, 50))
    reports = b"".join(pair.reports(one_hots(1000, 200, weight=50)))

    def turns_during_a_job() -> int:
        done = threading.Event()

        def lead() -> None:
            pair.lead(reports)
            done.set()

        worker = threading.Thread(target=lead)
        worker.start()
        turns = 0
        while not done.is_set():
            turns += 1
            time.sleep(0.0005)
        worker.join()
        return turns

    # With the GIL held, the first turn would end after the job, each time. A busy machine may give
    # this thread no turn during one job, but not during all of them.
    assert any(turns_during_a_job() > 5 for _ in range(100))


def test_memory_is_bounded_by_the_job_and_not_by_its_output_shares() -> None:
    """200 output shares of 10,000 bins would be 32 MB; the helper keeps one sum a thread."""
    script = """
from chorister._native import Prio3
from tests.native.pair import NativePair, one_hots
pair = NativePair(Prio3.multihot_count_vec(10_000, 50))
few = pair.lead(b"".join(pair.reports(one_hots(10_000, 4, weight=50)))).verify_inits
many = pair.lead(b"".join(pair.reports(one_hots(10_000, 200, weight=50)))).verify_inits
pair.help(few)
open("/proc/self/clear_refs", "w").write("5")  # Forget the peak of making the reports.
def high_water():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1])
before = high_water()
pair.help(many)
print(high_water() - before)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 12_000  # kB


def test_a_task_takes_any_prio3_instance() -> None:
    pair = NativePair(Prio3.histogram(7))
    task = TaskBinding(pair.vdaf, context=b"", aad=b"", leader_info=b"", helper_info=b"")
    reports = task.seal_reports(
        np.array([3, 3, 6], dtype=np.uint64),
        report_ids=os.urandom(48),
        time=0,
        leader_config=pair.leader.config,
        helper_config=pair.helper.config,
    )
    job = task.leader_initialize(pair.verify_key, [pair.leader], b"".join(reports))
    verify_resps, helped = task.helper_initialize(pair.verify_key, [pair.helper], job.verify_inits)
    led = job.finish(verify_resps)
    assert pair.result(led, helped).tolist() == [0, 0, 0, 2, 0, 0, 1]
