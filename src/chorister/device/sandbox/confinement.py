"""Confines a sandbox with the operating system's means, and reports what is not available.

Everything works without privileges. Each step that fails adds a sentence about it, and the next
layer remains. Only the standard library is imported here.

**Where it runs.** `FACILITIES` are what this system offers, and the one switch: whatever is not in
it is not used, in this process and in all sandboxes. Linux has all of them, and is the strictest.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import struct
import sys
import threading
from functools import cache
from typing import TYPE_CHECKING, Any, Final

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    # Imported where it is used: the app's process needs `FACILITIES` alone.
    import ctypes

FORK: Final = "fork"
"""Processes can be copied, and sockets handed over: a zygote forks the sandboxes."""
LIMITS: Final = "limits"
"""The module `resource`."""
ALARM: Final = "alarm"
"""The kernel ends a process at a given time."""
KERNEL: Final = "kernel"
"""Linux: namespaces, filters of system calls, and `/proc`."""
FACILITIES: frozenset[str] = frozenset(
    name
    for name, exists in {
        FORK: hasattr(os, "fork"),
        LIMITS: resource is not None,
        ALARM: hasattr(signal, "setitimer"),
        KERNEL: sys.platform == "linux",
    }.items()
    if exists
)

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

# What a missing protection means where the limits on a process remain.
_NO_FILTER: Final = (
    "no system call filter ({why})",
    "native code that a query could make SQLite run might still rename or delete files and signal "
    "processes of this user; it can't open or send anything",
)
_NO_NAMESPACE: Final = (
    "no network namespace ({why})",
    "the network is out of reach only because the sandbox can't get a new descriptor",
)
_NO_FORK: Final = (
    "no zygote (fork is missing): if the app is killed, a query may run until its deadline"
)
_NO_LIMITS: Final = (
    "no limits on files, descriptors, processes and memory (the module resource is missing): "
    "native code that a query could make SQLite run may do whatever the app's user may"
)
_NO_ALARM: Final = "no kernel alarm: a thread of the sandbox, and the device, end a query"
_NO_MEMORY_LIMIT: Final = "no limit on memory except SQLite's own ({why})"
_NOT_FIRST: Final = (
    "not the first process to be killed if memory runs out ({why})",
    "the system may end the app instead of the query, whose own limit on memory remains",
)
_PRIVILEGED: Final = (
    "no system call filter, and the device runs as root: a broken sandbox could lift its own limits"
)


def restrict(names: frozenset[str]) -> None:
    """Use these facilities at most, as the device does that started this process."""
    global FACILITIES
    FACILITIES &= names


def _lacking(what: tuple[str, str], why: object) -> str:
    """Say that a protection is missing, and what it means unless the limits are missing, too."""
    name, meaning = what[0].format(why=why), what[1]
    return f"{name}: {meaning}" if LIMITS in FACILITIES else name


def _system(*, processor: bool = False) -> str:
    # The module `platform` would have to be imported by every zygote.
    if not hasattr(os, "uname"):
        return "Windows"
    found = os.uname()
    return f"{found.sysname} on {found.machine}" if processor else found.sysname


def is_forked() -> list[str]:
    return [] if FORK in FACILITIES else [_NO_FORK]


def leave_network() -> list[str]:
    """Move this process, before it has threads, to a network namespace without a network."""
    if KERNEL not in FACILITIES:
        return [_lacking(_NO_NAMESPACE, f"{_system()} has none")]
    import ctypes

    for flags in (_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC, _CLONE_NEWNET | _CLONE_NEWIPC):
        if _libc().unshare(flags) == 0:
            return []
    return [_lacking(_NO_NAMESPACE, os.strerror(ctypes.get_errno()))]


def build_filter() -> None:
    """Build the filter of system calls once, in the zygote, and not in every sandbox."""
    if _has_filter():
        _program(os.uname().machine)


def go_first() -> list[str]:
    """Make this process and its forks the first ones to be killed if memory runs out."""
    if KERNEL not in FACILITIES:
        return [_lacking(_NOT_FIRST, f"{_system()} does not support this")]
    try:
        descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, b"1000")
        finally:
            os.close(descriptor)
    except OSError as error:
        return [_lacking(_NOT_FIRST, error.strerror)]
    return []


def die_with_parent(parent: int) -> None:
    """Be killed when the zygote ends; exit now if it has already ended."""
    if KERNEL in FACILITIES:
        _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


@cache
def prepare() -> int | OSError:
    """Give up what no job needs, before there is one: it takes longer than the rest.

    Returns how large the address space is now, or why nobody knows.
    """
    size: int | OSError
    try:
        size = _address_space()
    except OSError as error:
        size = error
    if ALARM in FACILITIES:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    if LIMITS in FACILITIES:
        for limit in (
            resource.RLIMIT_CORE,  # a core dump would hold the data
            resource.RLIMIT_FSIZE,
            resource.RLIMIT_NOFILE,  # no file, no socket, no pipe
        ):
            resource.setrlimit(limit, (0, 0))
    if _has_filter():
        _libc().prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        _libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return size


def confine(*, seconds: float, memory: int) -> list[str]:
    """Give up everything except the open socket, `memory` more bytes and some time.

    The alarm ends the process when its time is over, even if nobody else does.
    """
    size = prepare()
    return _set_alarm(seconds) + _set_limits(seconds, size, memory) + _filter_system_calls()


def _set_alarm(seconds: float) -> list[str]:
    seconds = max(seconds, 0.001)  # 0 would be no alarm
    if ALARM not in FACILITIES:
        alarm = threading.Timer(seconds, os._exit, [1])
        alarm.daemon = True
        alarm.start()
        return [_NO_ALARM]
    signal.setitimer(signal.ITIMER_REAL, seconds)
    return []


def _set_limits(seconds: float, size: int | OSError, memory: int) -> list[str]:
    if LIMITS not in FACILITIES:
        return [_NO_LIMITS]
    cpu = math.ceil(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))  # after the alarm, which may be a thread
    if isinstance(size, OSError):
        return [_NO_MEMORY_LIMIT.format(why=size.strerror)]
    try:
        resource.setrlimit(resource.RLIMIT_AS, (size + memory, size + memory))
    except (OSError, ValueError) as error:  # macOS refuses to limit the address space
        return [_NO_MEMORY_LIMIT.format(why=error)]
    return []


def _address_space() -> int:
    if KERNEL not in FACILITIES:
        raise FileNotFoundError(errno.ENOENT, "its size is unknown")
    descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(descriptor, 100).split()[0]) * resource.getpagesize()
    finally:
        os.close(descriptor)


def _has_filter() -> bool:
    if KERNEL not in FACILITIES:
        return False
    return os.uname().machine in _CALLS and struct.calcsize("P") == 8


def _filter_system_calls() -> list[str]:
    if not _has_filter():
        weaknesses = [_lacking(_NO_FILTER, _system(processor=True))]
    else:
        import ctypes

        program = _program(os.uname().machine)
        header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(program))
        if _libc().prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) == 0:
            return []
        weaknesses = [_lacking(_NO_FILTER, os.strerror(ctypes.get_errno()))]
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    return [*weaknesses, _PRIVILEGED] if is_root else weaknesses


@cache
def _program(machine: str) -> ctypes.Array[ctypes.c_char]:
    """Return a classic BPF program: this machine's numbers, listed calls, no executable memory."""
    import ctypes

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
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 4]
    return libc
