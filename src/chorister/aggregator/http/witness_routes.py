"""An aggregator as a witness of its log (c2sp.org/tlog-witness), in addition to polling it.

    POST {url}add-checkpoint            a checkpoint and a consistency proof; a cosignature
    GET  {url}{origin hash}/checkpoint  the checkpoint that was cosigned last

An aggregator vouches for more than a witness does, so it may refuse what a witness must not: 422
also means that the log's rules do not allow an entry, or that the last one is not the current list.
503 means that entries or bodies are missing: try again when they are there.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import anyio
from starlette.requests import Request
from starlette.routing import Route

from chorister.aggregator.cosigning import Cosigning
from chorister.aggregator.http.app import make_route, success
from chorister.aggregator.http.request_checks import read_body, read_headers
from chorister.aggregator.operations.metrics import Metrics
from chorister.errors import (
    DecodeError,
    LogError,
    LogRewound,
    LogSignatureInvalid,
    LogWithheld,
    ProblemError,
    StorageDamaged,
)
from chorister.http_server import RawResponse
from chorister.transparency.checkpoint import Checkpoint
from chorister.transparency.witness import (
    SIZE_TYPE,
    WitnessRequest,
    check_request,
    named_origin,
    origin_hash,
)

_TEXT = "text/plain; charset=utf-8"
_MAX_REQUEST_BYTES: Final = 16_384
"""Three times the longest request of a registry. Anybody may send one on every connection."""


class WitnessRoutes:
    """The two resources."""

    def __init__(self, cosigning: Cosigning, metrics: Metrics, prefix: str) -> None:
        self._cosigning = cosigning
        self._metrics = metrics
        self._prefix = prefix
        # One at a time: each may read the log for a while, and there is one log.
        self._turn = anyio.CapacityLimiter(1)

    def routes(self) -> list[Route]:
        folder = origin_hash(self._cosigning.origin)
        return [
            make_route(
                self._metrics, "add-checkpoint", f"{self._prefix}add-checkpoint", self._add, "POST"
            ),
            make_route(
                self._metrics,
                "cosigned-checkpoint",
                f"{self._prefix}{folder}/checkpoint",
                self._newest,
                "GET",
            ),
        ]

    async def _add(self, request: Request) -> RawResponse:
        length = read_headers(request.scope["headers"]).length
        data = await read_body(request, _MAX_REQUEST_BYTES, length)
        return await anyio.to_thread.run_sync(self._answer, data, limiter=self._turn)

    async def _newest(self, _: Request) -> RawResponse:
        newest = self._cosigning.newest()
        if newest is None:
            raise ProblemError(None, "nothing of this log was cosigned yet", status=404)
        return success(newest.encode(), media_type=_TEXT)

    def _answer(self, data: bytes) -> RawResponse:
        try:
            request = WitnessRequest.parse(data)
        except (DecodeError, LogError) as error:
            self._check_origin(named_origin(data))
            raise ProblemError(None, str(error), status=400) from error
        checkpoint = request.signed.checkpoint
        self._check_origin(checkpoint.origin)
        if request.old_size > checkpoint.size:
            raise ProblemError(None, "the old size is greater than the checkpoint's", status=400)
        try:
            self._cosigning.check_log(request.signed)
        except LogSignatureInvalid as error:
            raise ProblemError(None, str(error), status=403) from error
        last = self._cosigning.last
        if request.old_size != last.size:
            return _conflict(last)
        try:
            check_request(request, last)
            line = self._cosigning.cosign(request.signed)
        except LogRewound:
            return _conflict(self._cosigning.last)  # a larger one was cosigned meanwhile
        except (LogWithheld, StorageDamaged) as error:
            raise ProblemError(None, str(error), status=503) from error
        except LogError as error:
            raise ProblemError(None, str(error), status=422) from error
        return success(f"{line.encode()}\n".encode(), media_type=_TEXT)

    def _check_origin(self, origin: str | None) -> None:
        if origin not in (None, self._cosigning.origin):
            raise ProblemError(None, "this log is not known here", status=404)


def _conflict(last: Checkpoint) -> RawResponse:
    body = f"{last.size}\n".encode()
    return success(body, status=HTTPStatus.CONFLICT, media_type=SIZE_TYPE)
