"""Messages: bytes written by hand from the draft's structures, round trips, fuzzing both ways."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister._native import HPKEKeypair, hpke_seal
from chorister.dap.draft import BatchMode, Problem, ReportError, VerifyRespType
from chorister.dap.messages import (
    AggregateShare,
    AggregateShareAad,
    AggregateShareReq,
    AggregationJobContinueReq,
    AggregationJobInitReq,
    AggregationJobResp,
    BatchSelector,
    CollectionJobReq,
    CollectionJobResp,
    Extension,
    HpkeConfigList,
    Query,
    VerifyResp,
)
from chorister.dap.task import Interval, task_configuration
from chorister.dap.upload_messages import ReportUploadStatus, UploadErrors
from chorister.errors import DecodeError, InvalidInput, ProblemError
from tests.keyboard import POLICY, RECIPE

ID, OTHER_ID = bytes(range(16)), bytes(range(16, 32))
DECODERS: dict[str, Any] = {
    each.__name__: each
    for each in (
        AggregateShare,
        AggregateShareReq,
        AggregationJobContinueReq,
        AggregationJobInitReq,
        AggregationJobResp,
        BatchSelector,
        CollectionJobReq,
        CollectionJobResp,
        HpkeConfigList,
        Query,
        UploadErrors,
    )
}


def ciphertext(config_id: int = 7, enc: bytes = b"enc", payload: bytes = b"payload") -> bytes:
    return (
        bytes([config_id])
        + len(enc).to_bytes(2, "big")
        + enc
        + len(payload).to_bytes(4, "big")
        + payload
    )


def hpke_config(config_id: int, key: bytes = b"key") -> bytes:
    return bytes([config_id, 0, 0x20, 0, 1, 0, 1]) + len(key).to_bytes(2, "big") + key


# --- bytes by hand ------------------------------------------------------------------------------

# The query of the draft's example in section "Obtaining Aggregate Shares".
ASKED = Interval(1659540, 100)
CHOSEN = Interval(1659544, 10)
QUERY_HEX = "01" + "0010" + "00000000001952940000000000000064"
SELECTOR_HEX = "01" + "0010" + "0000000000195298000000000000000a"

BY_HAND = [
    (Query.of(ASKED), QUERY_HEX),
    (BatchSelector.of(CHOSEN), SELECTOR_HEX),
    (CollectionJobReq(query=Query.of(ASKED)), QUERY_HEX + "00000000" + "0000"),
    (
        CollectionJobReq(query=Query(BatchMode.LEADER_SELECTED, b""), agg_param=b"\x00\x01"),
        "02" + "0000" + "00000002" + "0001" + "0000",
    ),
    (
        AggregateShareReq(
            collection_job_req=CollectionJobReq(query=Query.of(ASKED)),
            batch_selector=BatchSelector.of(CHOSEN),
            report_count=1000,
            checksum=b"\x0a" * 32,
        ),
        QUERY_HEX + "00000000" + "0000" + SELECTOR_HEX + "00000000000003e8" + "0a" * 32,
    ),
    (
        CollectionJobResp(
            report_count=1000,
            interval=Interval(16595440, 1),
            leader_encrypted_agg_share=ciphertext(1, b"\x0f", b"\x0b\x0a"),
            helper_encrypted_agg_share=ciphertext(2, b"\x0c\x0d", b"\x08"),
        ),
        "00000000000003e8" + "0000000000fd39f0" + "0000000000000001"
        "01" + "0001" + "0f" + "00000002" + "0b0a"
        "02" + "0002" + "0c0d" + "00000001" + "08",
    ),
    (AggregateShare(ciphertext(9, b"e", b"p")), "09" + "000165" + "0000000170"),
    (
        AggregationJobInitReq(verify_inits=b"inits"),
        "00" + "00000000" + "0000" + b"inits".hex(),
    ),
    (
        AggregationJobInitReq(verification_key_id=3, agg_param=b"\x00\x01\x02", verify_inits=b""),
        "03" + "00000003" + "000102" + "0000",
    ),
    (
        AggregationJobContinueReq(step=1, continues=((ID, b"\xaa"), (OTHER_ID, b"\xbb\xcc"))),
        "0001" + ID.hex() + "00000001aa" + OTHER_ID.hex() + "00000002bbcc",
    ),
    (
        AggregationJobResp(ID + b"\0" + b"\0\0\0\x01z" + OTHER_ID + b"\x02\x02"),
        ID.hex() + "00" + "000000017a" + OTHER_ID.hex() + "02" + "02",
    ),
    (
        UploadErrors(
            (
                ReportUploadStatus(ID, ReportError.REPORT_REPLAYED),
                ReportUploadStatus(OTHER_ID, ReportError.OUTDATED_CONFIG),
            )
        ),
        ID.hex() + "02" + OTHER_ID.hex() + "0b",
    ),
    (UploadErrors(()), ""),
    # The draft's example of a list: ids 194 and 17.
    (
        HpkeConfigList(
            (
                bytes.fromhex("c2" + "0010" + "0001" + "0001" + "0004" + "01020304"),
                bytes.fromhex("11" + "0020" + "0001" + "0003" + "0004" + "04030201"),
            )
        ),
        "001a" + "c2" + "0010" + "0001" + "0001" + "0004" + "01020304"
        "11" + "0020" + "0001" + "0003" + "0004" + "04030201",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("message", "encoded"), BY_HAND, ids=lambda value: type(value).__name__)
def test_bytes_written_by_hand(message: Any, encoded: str) -> None:
    data = bytes.fromhex(encoded)
    assert message.encode() == data
    assert type(message).decode(data) == message


@pytest.mark.parametrize(("message", "encoded"), BY_HAND, ids=lambda value: type(value).__name__)
def test_neither_cut_nor_continued(message: Any, encoded: str) -> None:
    """Whatever still decodes with a byte less or more is another message, with those bytes."""
    data = bytes.fromhex(encoded)
    for altered in (data[:-1], data + b"\0"):
        try:
            other = type(message).decode(altered)
        except DecodeError:
            continue
        assert other.encode() == altered
        assert other != message or altered == data


# --- fuzzing ------------------------------------------------------------------------------------

INTERVALS = st.builds(Interval, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
CIPHERTEXTS = st.builds(
    ciphertext,
    st.integers(0, 255),
    st.binary(min_size=1, max_size=40),
    st.binary(min_size=1, max_size=40),
)
QUERIES = st.one_of(
    st.builds(Query.of, INTERVALS),
    st.builds(Query, st.just(BatchMode.LEADER_SELECTED), st.just(b"")),
)
SELECTORS = st.one_of(
    st.builds(BatchSelector.of, INTERVALS),
    st.builds(BatchSelector, st.just(BatchMode.LEADER_SELECTED), st.binary(max_size=32)),
)
COLLECTION_REQUESTS = st.builds(CollectionJobReq, query=QUERIES, agg_param=st.binary(max_size=9))
UINT64 = st.integers(0, 2**64 - 1)
IDS = st.binary(min_size=16, max_size=16)
MESSAGES: st.SearchStrategy[Any] = st.one_of(
    QUERIES,
    SELECTORS,
    COLLECTION_REQUESTS,
    st.builds(
        CollectionJobResp,
        report_count=UINT64,
        interval=INTERVALS,
        leader_encrypted_agg_share=CIPHERTEXTS,
        helper_encrypted_agg_share=CIPHERTEXTS,
    ),
    st.builds(
        AggregateShareReq,
        collection_job_req=COLLECTION_REQUESTS,
        batch_selector=SELECTORS,
        report_count=UINT64,
        checksum=st.binary(min_size=32, max_size=32),
    ),
    st.builds(AggregateShare, CIPHERTEXTS),
    st.builds(
        AggregationJobInitReq,
        verification_key_id=st.integers(0, 255),
        agg_param=st.binary(max_size=9),
        verify_inits=st.binary(max_size=50),
    ),
    st.builds(
        AggregationJobContinueReq,
        step=st.integers(0, 2**16 - 1),
        continues=st.lists(st.tuples(IDS, st.binary(min_size=1, max_size=9)), max_size=4).map(
            tuple
        ),
    ),
    st.builds(
        UploadErrors,
        st.lists(st.builds(ReportUploadStatus, IDS, st.integers(0, 255)), max_size=4).map(tuple),
    ),
    st.builds(
        HpkeConfigList,
        st.lists(
            st.builds(hpke_config, st.integers(0, 255), st.binary(min_size=1, max_size=40)),
            min_size=1,
            max_size=4,
            unique_by=lambda config: config[0],
        ).map(tuple),
    ),
)


@given(MESSAGES)
def test_what_is_encoded_decodes(message: Any) -> None:
    assert type(message).decode(message.encode()) == message


@pytest.mark.parametrize("name", DECODERS)
@given(data=st.data())
def test_any_bytes_decode_to_themselves_or_are_refused(name: str, data: st.DataObject) -> None:
    """Random bytes, and real messages of any kind with some bytes changed."""
    given_bytes = data.draw(
        st.one_of(
            st.binary(max_size=120),
            MESSAGES.map(lambda message: message.encode()),
            st.builds(
                lambda message, at, byte: _changed(message.encode(), at, byte),
                MESSAGES,
                st.integers(0, 200),
                st.integers(0, 255),
            ),
        )
    )
    try:
        message = DECODERS[name].decode(given_bytes)
    except (DecodeError, ProblemError):
        return
    assert message.encode() == given_bytes


def _changed(data: bytes, at: int, byte: int) -> bytes:
    if not data:
        return data
    at %= len(data)
    return data[:at] + bytes([byte]) + data[at + 1 :]


# --- extensions ---------------------------------------------------------------------------------

ONE, TWO = Extension(23, b"a"), Extension(42, b"")
ORDERS = [
    ((ONE,), Problem.UNSUPPORTED_EXTENSION, [23]),
    ((ONE, TWO), Problem.UNSUPPORTED_EXTENSION, [23, 42]),
    ((TWO, ONE), None, None),
    ((ONE, ONE), None, None),
]


@pytest.mark.parametrize(("extensions", "problem", "unsupported"), ORDERS)
def test_extensions_of_a_collection_job(
    extensions: tuple[Extension, ...], problem: Problem | None, unsupported: list[int] | None
) -> None:
    request = CollectionJobReq(query=Query.of(ASKED), extensions=extensions)
    inside = AggregateShareReq(
        collection_job_req=request,
        batch_selector=BatchSelector.of(CHOSEN),
        report_count=1,
        checksum=bytes(32),
    )
    for message in (request, inside):
        with pytest.raises(ProblemError) as caught:
            type(message).decode(message.encode())
        assert caught.value.problem == (problem or Problem.INVALID_EXTENSION)
        assert caught.value.extra.get("unsupported_extensions") == unsupported


@pytest.mark.parametrize(("extensions", "problem", "unsupported"), ORDERS)
def test_extensions_of_an_aggregation_job(
    extensions: tuple[Extension, ...], problem: Problem | None, unsupported: list[int] | None
) -> None:
    request = AggregationJobInitReq(extensions=extensions, verify_inits=b"")
    with pytest.raises(ProblemError) as caught:
        AggregationJobInitReq.decode(request.encode())
    assert caught.value.problem == (problem or Problem.INVALID_MESSAGE)
    assert caught.value.extra.get("unsupported_extensions") == unsupported


# --- details ------------------------------------------------------------------------------------


def test_two_configs_with_one_id_are_no_list() -> None:
    configs = hpke_config(5) + hpke_config(5)
    with pytest.raises(DecodeError, match="same id"):
        HpkeConfigList.decode(len(configs).to_bytes(2, "big") + configs)
    with pytest.raises(InvalidInput, match="same id"):
        HpkeConfigList((hpke_config(5), hpke_config(5)))


def test_an_empty_list_of_configs_is_refused() -> None:
    with pytest.raises(DecodeError, match="at least 10"):
        HpkeConfigList.decode(b"\0\0")


def test_our_own_configs_go_through_a_list() -> None:
    ours = tuple(HPKEKeypair.generate(config_id).config for config_id in (3, 200))
    configs = HpkeConfigList.decode(HpkeConfigList(ours).encode())
    assert configs.configs == ours
    assert configs.ids == bytes([3, 200])


@pytest.mark.parametrize(
    "data",
    [
        b"\0" + b"\0\x10" + bytes(16),  # a reserved batch mode
        b"\x03" + b"\0\x10" + bytes(16),  # an unknown one
        b"\x01" + b"\0\x0f" + bytes(15),  # an interval too short
        b"\x01" + b"\0\x11" + bytes(17),  # and too long
    ],
)
def test_queries_that_are_none(data: bytes) -> None:
    with pytest.raises(DecodeError):
        Query.decode(data)


def test_only_a_time_interval_has_an_interval() -> None:
    assert Query.of(ASKED).batch_interval == ASKED
    with pytest.raises(DecodeError, match="LEADER_SELECTED"):
        _ = Query(BatchMode.LEADER_SELECTED, b"").batch_interval


def test_the_word_on_each_report() -> None:
    data = (
        ID + b"\0" + b"\0\0\0\x02hi" + OTHER_ID + b"\x01" + ID + b"\x02" + b"\x06"
    )  # continue, finish, reject
    assert list(AggregationJobResp.decode(data).responses()) == [
        VerifyResp(ID, VerifyRespType.CONTINUE, payload=b"hi"),
        VerifyResp(OTHER_ID, VerifyRespType.FINISH),
        VerifyResp(ID, VerifyRespType.REJECT, error=ReportError.VDAF_VERIFY_ERROR),
    ]
    with pytest.raises(DecodeError, match="3 is not a type"):
        AggregationJobResp.decode(ID + b"\x03")


def test_lengths_that_do_not_fit() -> None:
    with pytest.raises(InvalidInput, match="report id"):
        UploadErrors((ReportUploadStatus(b"short", 1),)).encode()
    share_request = AggregateShareReq(
        collection_job_req=CollectionJobReq(query=Query.of(ASKED)),
        batch_selector=BatchSelector.of(CHOSEN),
        report_count=1,
        checksum=b"",
    )
    with pytest.raises(InvalidInput, match="checksum"):
        share_request.encode()
    task = task_configuration(POLICY, RECIPE, {"user.locale": "de_DE"})
    aad = AggregateShareAad(
        task_id=b"",
        task_configuration=task.configuration,
        collection_job_req=share_request.collection_job_req,
    )
    with pytest.raises(InvalidInput, match="task id"):
        aad.encode()


def test_what_seals_an_aggregate_share() -> None:
    task = task_configuration(POLICY, RECIPE, {"user.locale": "de_DE"})
    request = CollectionJobReq(query=Query.of(ASKED))
    aad = AggregateShareAad(
        task_id=task.task_id, task_configuration=task.configuration, collection_job_req=request
    ).encode()
    assert aad == task.task_id + task.configuration.encode() + request.encode()
    keypair = HPKEKeypair.generate(4)
    sealed = AggregateShare.decode(hpke_seal(keypair.config, b"info", aad, b"share"))
    assert keypair.open(sealed.encrypted_aggregate_share, b"info", aad) == b"share"
