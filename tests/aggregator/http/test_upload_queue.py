"""Group commit: one transaction for many, answers after it, bounds, and what a failure does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from chorister.aggregator.http.report_writer import QueueFull, UploadQueue


class SlowStorage:
    """Stores numbers; the first transaction waits until it may go on."""

    def __init__(self) -> None:
        self.transactions: list[list[int]] = []
        self.go = threading.Event()
        self.entered = threading.Event()

    def store(self, numbers: Sequence[int]) -> list[int]:
        self.entered.set()
        assert self.go.wait(10)
        self.transactions.append(list(numbers))
        return [number * 10 for number in numbers]


async def entered(disk: SlowStorage) -> None:
    await asyncio.to_thread(disk.entered.wait, 10)


def test_what_comes_during_a_transaction_shares_the_next_one() -> None:
    disk = SlowStorage()
    told: list[int] = []

    async def main() -> None:
        queue = UploadQueue(disk.store, batch=3, stored=lambda count, _: told.append(count))
        first = queue.put(1, 5)
        await entered(disk)
        rest = [queue.put(number, 5) for number in range(2, 7)]
        assert queue.waiting == 6
        assert not first.done()
        disk.go.set()
        assert await asyncio.gather(first, *rest) == [10, 20, 30, 40, 50, 60]
        await queue.close()
        assert queue.waiting == 0

    asyncio.run(main())
    assert disk.transactions == [[1], [2, 3, 4], [5, 6]]
    assert told == [1, 3, 2]


@pytest.mark.parametrize(("requests", "room"), [(2, 1000), (1000, 25)])
def test_a_full_queue_says_so_and_recovers(requests: int, room: int) -> None:
    disk = SlowStorage()

    async def main() -> None:
        queue = UploadQueue(disk.store, max_waiting=requests, max_bytes=room)
        taken = [queue.put(1, 10), queue.put(2, 10)]
        with pytest.raises(QueueFull):
            queue.put(3, 10)
        disk.go.set()
        await asyncio.gather(*taken)
        assert await queue.put(3, 10) == 30
        await queue.close()

    asyncio.run(main())


def test_a_failed_transaction_is_told_to_all_of_it_and_to_nobody_else() -> None:
    disk = SlowStorage()

    def store(numbers: Sequence[int]) -> list[int]:
        stored = disk.store(numbers)
        if 1 in numbers:
            raise OSError("the disk is full")
        return stored

    async def main() -> None:
        queue = UploadQueue(store)
        before = queue.put(0, 1)
        await entered(disk)
        failed = [queue.put(1, 1), queue.put(2, 1)]  # both wait for the next transaction
        disk.go.set()
        assert await before == 0
        outcomes = await asyncio.gather(*failed, return_exceptions=True)
        assert all(isinstance(each, OSError) for each in outcomes)
        assert await queue.put(3, 1) == 30
        await queue.close()

    asyncio.run(main())
    assert disk.transactions == [[0], [1, 2], [3]]


def test_two_transactions_at_the_same_time_if_there_are_two_threads() -> None:
    both = threading.Barrier(2, timeout=10)

    def store(numbers: Sequence[int]) -> list[int]:
        both.wait()
        return list(numbers)

    async def main() -> None:
        queue = UploadQueue(store, batch=1, threads=2)
        assert list(await asyncio.gather(queue.put(1, 1), queue.put(2, 1))) == [1, 2]
        await queue.close()

    asyncio.run(main())


def test_an_answer_that_fails_keeps_no_other_from_its_client() -> None:
    disk = SlowStorage()
    outcomes: list[int | BaseException] = []
    reported: list[object] = []

    def fails(_outcome: object) -> None:
        raise RuntimeError("the socket is gone")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
        queue = UploadQueue(disk.store)
        queue.add(1, 1, fails)
        queue.add(2, 1, outcomes.append)
        disk.go.set()
        await queue.close()
        assert queue.waiting == 0

    asyncio.run(main())
    assert outcomes == [20]
    assert [str(error) for error in reported] == ["the socket is gone"]


def test_closing_writes_what_waits_and_takes_nothing_more() -> None:
    disk = SlowStorage()

    async def main() -> None:
        queue = UploadQueue(disk.store)
        first = queue.put(1, 1)
        await entered(disk)
        second = queue.put(2, 1)
        closing = asyncio.create_task(queue.close())
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            queue.put(3, 1)
        disk.go.set()
        await closing
        assert (first.result(), second.result()) == (10, 20)

    asyncio.run(main())


def test_a_client_that_goes_away_takes_nobody_with_it() -> None:
    disk = SlowStorage()

    async def main() -> None:
        queue = UploadQueue(disk.store)
        before = queue.put(0, 1)
        await entered(disk)
        gone, stays = queue.put(1, 1), queue.put(2, 1)
        gone.cancel()
        disk.go.set()
        assert await before == 0
        assert await stays == 20
        await queue.close()

    asyncio.run(main())
    assert disk.transactions == [[0], [1, 2]]  # it was sent, so it is kept


def test_an_empty_queue_closes_at_once() -> None:
    async def main() -> None:
        await asyncio.wait_for(UploadQueue[int, int](list).close(), 5)

    asyncio.run(main())
