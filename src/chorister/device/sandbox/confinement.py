"""Confines a sandbox with the operating system's means, and reports what is not available.

Everything works without privileges. Each step that fails adds a sentence about it, and the next
layer remains. Only the standard library is imported here.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import resource
import signal
import struct
import sys
from functools import cache
from typing import Any, Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_SET_SECCOMP: Final = 22
_PR_SET_NO_NEW_PRIVS: Final = 38
_SECCOMP_MODE_FILTER: Final = 2
_CLONE_NEWIPC: Final = 0x0800_0000
_CLONE_NEWUSER: Final = 0x1000_0000
_CLONE_NEWNET: Final = 0x4000_0000

_PROT_EXEC: Final = 4
_EPERM: Final = 1

# What Python, apsw and the C library call once everything is imported: memory, the one socket,
# the clock, randomness, and the end. Numbers by machine, from the kernel's tables.
_CALLS: Final[dict[str, dict[str, Any]]] = {
    "x86_64": {
        "audit": 0xC000_003E,
        "mmap": 9,
        "mprotect": 10,
        "others": {
            "read": 0, "write": 1, "close": 3, "munmap": 11, "brk": 12, "rt_sigaction": 13,
            "rt_sigprocmask": 14, "rt_sigreturn": 15, "sched_yield": 24, "mremap": 25,
            "madvise": 28, "sendto": 44, "recvfrom": 45, "exit": 60, "gettimeofday": 96,
            "gettid": 186, "futex": 202, "restart_syscall": 219, "clock_gettime": 228,
            "exit_group": 231, "poll": 7, "ppoll": 271, "getrandom": 318, "getpid": 39,
        },
    },
    "aarch64": {
        "audit": 0xC000_00B7,
        "mmap": 222,
        "mprotect": 226,
        "others": {
            "close": 57, "read": 63, "write": 64, "ppoll": 73, "exit": 93, "exit_group": 94,
            "futex": 98, "clock_gettime": 113, "sched_yield": 124, "restart_syscall": 128,
            "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139, "gettimeofday": 169,
            "getpid": 172, "gettid": 178, "sendto": 206, "recvfrom": 207, "brk": 214,
            "munmap": 215, "mremap": 216, "madvise": 233, "getrandom": 278,
        },
    },
}  # fmt: skip

_NO_FILTER: Final = (
    "no system call filter ({why}): native code that a query could make SQLite run might still "
    "rename or delete files and signal processes of this user; it can't open or send anything"
)
_NO_NAMESPACE: Final = (
    "no network namespace ({why}): the network is out of reach only because the sandbox can't get "
    "a new descriptor"
)
_NO_MEMORY_LIMIT: Final = "no limit on memory except SQLite's own ({why})"
_NOT_FIRST: Final = (
    "not the first process to be killed if memory runs out ({why}): the system may end the app "
    "instead of the query, whose own limit on memory remains"
)
_PRIVILEGED: Final = (
    "no system call filter, and the device runs as root: a broken sandbox could lift its own limits"
)


def leave_network() -> list[str]:
    """Move the zygote, before it has threads, to a network namespace without a network."""
    if sys.platform != "linux":
        return [_NO_NAMESPACE.format(why=f"{platform.system()} has none")]
    for flags in (_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC, _CLONE_NEWNET | _CLONE_NEWIPC):
        if _libc().unshare(flags) == 0:
            return []
    return [_NO_NAMESPACE.format(why=os.strerror(ctypes.get_errno()))]


def build_filter() -> None:
    """Build the filter of system calls once, in the zygote, and not in every sandbox."""
    if platform.machine() in _CALLS:
        _program(platform.machine())


def go_first() -> list[str]:
    """Make the zygote and its forks the first processes to be killed if memory runs out."""
    try:
        descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, b"1000")
        finally:
            os.close(descriptor)
    except OSError as error:
        return [_NOT_FIRST.format(why=error.strerror)]
    return []


def die_with_parent(parent: int) -> None:
    """Be killed when the zygote ends; exit now if it has already ended."""
    if sys.platform == "linux":
        _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def confine(*, seconds: float, memory: int) -> list[str]:
    """Give up everything except the open socket, `memory` more bytes and some time.

    The alarm ends the process when its time is over, even if nobody else does.
    """
    weaknesses = []
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))  # 0 would be no alarm
    cpu = math.ceil(seconds) + 1
    limits = {
        resource.RLIMIT_CORE: 0,  # a core dump would hold the data
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 0,  # no file, no socket, no pipe
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CPU: cpu,
    }
    try:
        limits[resource.RLIMIT_AS] = _address_space() + memory
    except OSError as error:
        weaknesses.append(_NO_MEMORY_LIMIT.format(why=error.strerror))
    for limit, value in limits.items():
        try:
            resource.setrlimit(limit, (value, value))
        except (OSError, ValueError) as error:
            # macOS refuses to limit the address space.
            if limit != getattr(resource, "RLIMIT_AS", None):
                raise
            weaknesses.append(_NO_MEMORY_LIMIT.format(why=error))
    return weaknesses + _filter_system_calls()


def _address_space() -> int:
    descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(descriptor, 100).split()[0]) * resource.getpagesize()
    finally:
        os.close(descriptor)


def _filter_system_calls() -> list[str]:
    calls = _CALLS.get(platform.machine())
    if sys.platform != "linux" or calls is None or struct.calcsize("P") != 8:
        weaknesses = [_NO_FILTER.format(why=f"{platform.system()} on {platform.machine()}")]
    else:
        libc = _libc()
        program = _program(platform.machine())
        header = ctypes.create_string_buffer(
            struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(program)), 16
        )
        libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        if (
            libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            and libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) == 0
        ):
            return []
        weaknesses = [_NO_FILTER.format(why=os.strerror(ctypes.get_errno()))]
    return [*weaknesses, _PRIVILEGED] if os.geteuid() == 0 else weaknesses


@cache
def _program(machine: str) -> ctypes.Array[ctypes.c_char]:
    """Return a classic BPF program: this machine's numbers, listed calls, no executable memory."""
    calls = _CALLS[machine]
    load, equal, any_bit, answer = 0x20, 0x15, 0x45, 0x06
    allow, refuse, kill = 0x7FFF_0000, 0x0005_0000 | _EPERM, 0x8000_0000
    number, architecture, protection = 0, 4, 16 + 2 * 8

    def step(code: int, true: int, false: int, value: int) -> bytes:
        return struct.pack("HBBI", code, true, false, value)

    steps = [
        step(load, 0, 0, architecture),
        step(equal, 1, 0, calls["audit"]),
        step(answer, 0, 0, kill),
        step(load, 0, 0, number),
    ]
    for call in calls["others"].values():
        steps += [step(equal, 0, 1, call), step(answer, 0, 0, allow)]
    steps += [
        step(equal, 2, 0, calls["mmap"]),
        step(equal, 1, 0, calls["mprotect"]),
        step(answer, 0, 0, refuse),
        step(load, 0, 0, protection),
        step(any_bit, 0, 1, _PROT_EXEC),
        step(answer, 0, 0, refuse),
        step(answer, 0, 0, allow),
    ]
    program = b"".join(steps)
    return ctypes.create_string_buffer(program, len(program))


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 4]
    return libc
