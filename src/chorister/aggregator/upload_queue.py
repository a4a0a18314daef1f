"""Group commit: uploads of many clients go to the disk together, and each is answered after that.

While one transaction is being written, whatever comes in waits for the next; so one sync of the
disk serves all who came meanwhile, and nobody waits for a timer. The queue is bounded in requests
and in bytes: beyond that clients are told to come back.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

__all__ = ["QueueFull", "UploadQueue"]

P = TypeVar("P")
R = TypeVar("R")


class QueueFull(Exception):
    """No room: the client is to come back later."""


class UploadQueue(Generic[P, R]):
    """Hands what was put to `store`, many at a time, one transaction after another."""

    def __init__(
        self,
        store: Callable[[Sequence[P]], Sequence[R]],
        *,
        max_waiting: int = 4096,
        max_bytes: int = 256 << 20,
        batch: int = 256,
        stored: Callable[[int, float], None] = lambda _count, _seconds: None,
    ) -> None:
        """`store` runs in a thread of its own; `stored` is told of each transaction on the loop."""
        self._store = store
        self._max_waiting = max_waiting
        self._max_bytes = max_bytes
        self._batch = batch
        self._stored = stored
        self._waiting: deque[tuple[P, int, asyncio.Future[R]]] = deque()
        self._bytes = 0
        self._under_way = 0
        self._closing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="uploads")
        self._writer: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Requests that have no answer yet."""
        return len(self._waiting) + self._under_way

    def put(self, plan: P, size: int) -> asyncio.Future[R]:
        """Queue one request of `size` bytes; the future is done when it is durable."""
        if (
            self._closing
            or self.waiting >= self._max_waiting
            or self._bytes + size > self._max_bytes
        ):
            raise QueueFull
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        self._waiting.append((plan, size, future))
        self._bytes += size
        if self._writer is None or self._writer.done():
            self._writer = loop.create_task(self._write())
        return future

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            taken = [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]
            self._under_way = len(taken)
            plans = [plan for plan, _, _ in taken]
            begun = time.monotonic()
            try:
                results = await loop.run_in_executor(self._thread, self._store, plans)
            except BaseException as error:
                for _, _, future in taken:
                    if not future.done():
                        future.set_exception(error)
                if not isinstance(error, Exception):
                    raise
            else:
                for (_, _, future), result in zip(taken, results, strict=True):
                    if not future.done():  # its client may have gone
                        future.set_result(result)
                self._stored(len(taken), time.monotonic() - begun)
            finally:
                self._bytes -= sum(size for _, size, _ in taken)
                self._under_way = 0

    async def close(self) -> None:
        """Take nothing more, and write what waits."""
        self._closing = True
        if self._writer is not None:
            await asyncio.wait([self._writer])
        self._thread.shutdown()
