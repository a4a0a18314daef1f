"""Many devices in one process, one after the other, as a simulated fleet runs them."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

from _question import DAY, NOW, REGISTRY, QuestionLog
from chorister.clock import SettableClock
from chorister.device import Device, GivenKey, HeadFile, Sandbox, Timing
from chorister.device.run import Hook, no_hook

_TICKS = os.sysconf("SC_CLK_TCK")


def fleet(place: Path, sandbox: Sandbox, count: int) -> dict[str, float]:
    """Make so many devices with five events each, then let each answer one recipe."""
    question, clock = QuestionLog(), SettableClock(NOW - DAY)
    (place / "heads").mkdir()
    devices: dict[int, Device] = {}
    zygote = sandbox._zygote._process.pid  # type: ignore[attr-defined]

    def make(number: int) -> None:
        with a_device(place, str(number), question, clock, sandbox) as device:
            devices[number] = device
            device.opt_in()
            device.set_profile("user", {"age": 33, "locale": "en_GB"})
            device.donate_many("keyboard", [{"ngram": "see you soon", "perplexity": 1.0}] * 5)
            device.run_once()

    def answer(number: int) -> None:
        with devices[number] as device:
            if device.run_once().answered != ("fleet",):
                raise RuntimeError("a device of the fleet did not answer")

    question.ask(time=clock.now())
    before = memory(os.getpid())
    made = timed(count, make, zygote)
    clock.set(NOW)
    question.ask(question.recipe("fleet"))
    answered = timed(count, answer, zygote)
    return {
        "fleet_devices": count,
        "fleet_make_milliseconds": made[0],
        "fleet_make_cpu_milliseconds": made[1],
        "fleet_round_milliseconds": answered[0],
        "fleet_round_cpu_milliseconds": answered[1],
        "fleet_kilobytes_a_device": (memory(os.getpid()) - before) / count / 1e3,
        "memory_megabytes": memory(os.getpid()) / 1e6,
        "zygote_memory_megabytes": memory(zygote) / 1e6,
    }


def a_device(
    place: Path,
    name: str,
    question: QuestionLog,
    clock: SettableClock,
    sandbox: Sandbox,
    hook: Hook = no_hook,
) -> Device:
    """A new one, whose head is in the folder `heads`."""
    return Device(
        place / name,
        question.policy,
        GivenKey(bytes(32)),
        registry=REGISTRY,
        head=HeadFile(place / "heads" / name),
        create=True,
        clock=clock,
        transport=question,
        sandbox=sandbox,
        timing=Timing(settle=0),
        hook=hook,
    )


def timed(count: int, work: Callable[[int], None], zygote: int) -> tuple[float, float]:
    """Milliseconds per device: of the clock, and of all processors, the sandboxes' included.

    Each device is closed in between: a thousand have more open files than a process may.
    """
    start, cpu = time.perf_counter(), processor(zygote)
    for number in range(count):
        work(number)
    many = count / 1e3
    return (time.perf_counter() - start) / many, (processor(zygote) - cpu) / many


def processor(zygote: int) -> float:
    """Seconds of this process, of the zygote, and of the sandboxes that it reaped."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    fields = Path(f"/proc/{zygote}/stat").read_text().rpartition(")")[2].split()
    return own.ru_utime + own.ru_stime + sum(map(int, fields[11:15])) / _TICKS


def memory(process: int) -> int:
    """Bytes of memory that a process holds now."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * resource.getpagesize()
