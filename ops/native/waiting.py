"""How threads wait: a spin, giving the core away, and sleeping in the system until a word changes.

    pause()                         a hint to the core inside a spin loop
    sched_yield()                   another thread may have this core
    sleep_while_equal(addr, value)  sleep while the 32-bit word at addr equals value; may return early
    wake_sleepers(addr)             wake every thread that sleeps on addr

Each system sleeps in its own way (`WAY`): Linux by futex, macOS by os_sync_wait_on_address (14.4 and later) or
__ulock_wait, Windows by WaitOnAddress.  All compare the word and fall asleep as one step, so no wake-up is lost.  Where
the system has none of them WAY is "" and the last two do nothing: the thread pool waits in Python then.
"""
import ctypes
import os
import sys

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ggjit.ops.native import isa
from ggjit.ops.native.mem import call_intrinsic

_I32, _I64, _POINTER = ir.IntType(32), ir.IntType(64), ir.IntType(8).as_pointer()

# Linux: the number of the system call futex
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}
_WAIT_PRIVATE, _WAKE_PRIVATE, _ALL = 128, 129, (1 << 31) - 1
# macOS: operations of __ulock_wait and __ulock_wake (bsd/sys/ulock.h)
_COMPARE_AND_WAIT, _WAKE_ALL = 1, 0x100
_FOREVER = 0xFFFFFFFF                           # Windows: INFINITE


def _windows():
    """{name in jitted code: address} of Windows' functions, which LLVM does not find by itself."""
    kernel = ctypes.windll.kernel32
    found = {"sched_yield": kernel.SwitchToThread}
    try:
        synchronization = ctypes.WinDLL("api-ms-win-core-synch-l1-2-0.dll")         # Windows 8 and later
        found |= {name: getattr(synchronization, name) for name in ("WaitOnAddress", "WakeByAddressAll")}
    except (OSError, AttributeError):
        return _addresses(found)
    return _addresses(found)


def _addresses(functions):
    return {name: ctypes.cast(f, ctypes.c_void_p).value for name, f in functions.items()}


def _way(platform, machine, has):
    """The way of a system; has: name of a C function -> is it in this process?"""
    if platform.startswith("linux"):
        return "futex" if machine in _FUTEX else ""
    if platform == "darwin":
        return next((name for name in ("os_sync_wait_on_address", "__ulock_wait") if has(name)), "")
    return "WaitOnAddress" if platform == "win32" and has("WaitOnAddress") else ""


# C functions that jitted code calls by name; LLVM has to be told their addresses
SYMBOLS = _windows() if sys.platform == "win32" else {}
_MACHINE = os.uname().machine if hasattr(os, "uname") else ""
WAY = _way(sys.platform, _MACHINE,
           lambda name: name in SYMBOLS if sys.platform == "win32" else hasattr(ctypes.CDLL(None), name))


@intrinsic
def pause(typingctx):
    """Tell the core that this is a spin loop."""
    def codegen(context, b, sig, args):
        if isa.X86:
            call_intrinsic(b, "llvm.x86.sse2.pause", ir.VoidType(), [])
        elif isa.ARM64:
            call_intrinsic(b, "llvm.aarch64.isb", ir.VoidType(), [_I32(15)])     # `yield` does nothing on most cores
        return context.get_dummy_value()
    return types.void(), codegen


@intrinsic
def sched_yield(typingctx):
    """POSIX's sched_yield; on Windows SwitchToThread under that name."""
    def codegen(context, b, sig, args):
        call_intrinsic(b, "sched_yield", _I32, [])
        return context.get_dummy_value()
    return types.void(), codegen


def _syscall(b, addr, operation, value):
    """libc's variadic syscall(SYS_futex, addr, operation, value, no timeout, ...)."""
    f = b.module.globals.get("syscall") or ir.Function(b.module, ir.FunctionType(_I64, [_I64], var_arg=True), "syscall")
    b.call(f, [_I64(_FUTEX[_MACHINE]), addr, _I64(operation), value, _I64(0), _I64(0), _I64(0)])


def emit_sleep(b, way, addr, value):
    """LLVM code that sleeps while the 32-bit word at the i64 `addr` equals the low half of the i64 `value`."""
    word = b.inttoptr(addr, _POINTER)
    if way == "futex":
        _syscall(b, addr, _WAIT_PRIVATE, value)
    elif way == "os_sync_wait_on_address":                  # (address, value, bytes, flags)
        call_intrinsic(b, way, _I32, [word, b.and_(value, _I64(0xFFFFFFFF)), _I64(4), _I32(0)])
    elif way == "__ulock_wait":                             # (operation, address, value, microseconds: 0 is for ever)
        call_intrinsic(b, way, _I32, [_I32(_COMPARE_AND_WAIT), word, b.and_(value, _I64(0xFFFFFFFF)), _I32(0)])
    elif way == "WaitOnAddress":                            # (address, address of the value, bytes, milliseconds)
        copy = cgutils.alloca_once_value(b, b.trunc(value, _I32))
        call_intrinsic(b, way, _I32, [word, b.bitcast(copy, _POINTER), _I64(4), _I32(_FOREVER)])


def emit_wake(b, way, addr):
    """LLVM code that wakes every thread that sleeps on the i64 `addr`."""
    word = b.inttoptr(addr, _POINTER)
    if way == "futex":
        _syscall(b, addr, _WAKE_PRIVATE, _I64(_ALL))
    elif way == "os_sync_wait_on_address":
        call_intrinsic(b, "os_sync_wake_by_address_all", _I32, [word, _I64(4), _I32(0)])
    elif way == "__ulock_wait":
        call_intrinsic(b, "__ulock_wake", _I32, [_I32(_COMPARE_AND_WAIT | _WAKE_ALL), word, _I64(0)])
    elif way == "WaitOnAddress":
        call_intrinsic(b, "WakeByAddressAll", ir.VoidType(), [word])


@intrinsic
def sleep_while_equal(typingctx, addr, value):
    def codegen(context, b, sig, args):
        emit_sleep(b, WAY, *args)
        return context.get_dummy_value()
    return types.void(types.int64, types.int64), codegen


@intrinsic
def wake_sleepers(typingctx, addr):
    def codegen(context, b, sig, args):
        emit_wake(b, WAY, *args)
        return context.get_dummy_value()
    return types.void(types.int64), codegen
