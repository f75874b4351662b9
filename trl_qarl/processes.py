"""
Signal handling that ends a command and the processes that it started: Linux delivers only signals with a handler to
process 1 of a container. Memory that a process keeps. Needs no torch.

`python -m trl_qarl.processes MODULE ...` runs another package's module with these handlers, until it installs its own.
With `--parent=PID COMMAND ...` it becomes a command that ends with its parent, see [`as_child`].
"""

import _thread
import ctypes
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import NoReturn


_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_SECONDS_UNTIL_REPEATED = 0.05


class Signaled(SystemExit):
    """The exit of this process on a signal."""


def exit_on_signals() -> Callable[[], None]:
    """
    Make SIGTERM and SIGHUP end this process as Ctrl-C does, through every `finally`, with an exit code of 128 plus the
    signal's number. Return a function that restores the earlier behaviour.

    A handler that is already installed stays, and a signal that is ignored, as after `nohup`, stays ignored. Outside
    of the main thread this does nothing.

    Python drops an exception that leaves a `__del__` or a callback of its own. A signal that arrives there is sent
    again until it ends the process.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    ours = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    report = sys.unraisablehook
    repeated = set()

    def leave(signum, frame):
        if _is_in_finalizer(frame):
            start_repeating(signum)
            return
        # `timeout` and others send the signal twice; the second must not interrupt the cleanup after the first.
        for number in ours:
            signal.signal(number, signal.SIG_IGN)
        raise Signaled(128 + signum)

    def report_or_repeat(dropped):
        if not isinstance(dropped.exc_value, Signaled):
            report(dropped)
            return
        for number in ours:
            signal.signal(number, leave)
        start_repeating(dropped.exc_value.code - 128)

    def start_repeating(signum):
        if signum not in repeated:
            repeated.add(signum)
            # The lowest way to start a thread: `threading` takes locks, which the interrupted code may hold.
            _thread.start_new_thread(repeat, (signum,))

    def repeat(signum):
        time.sleep(_SECONDS_UNTIL_REPEATED)
        # One signal is not enough: a system call that starts just then runs on before Python calls the handler.
        while signal.getsignal(signum) is leave:
            # To the thread that runs Python's handlers, which may be waiting in C.
            signal.pthread_kill(threading.main_thread().ident, signum)
            time.sleep(_SECONDS_UNTIL_REPEATED)
        repeated.discard(signum)

    def restore():
        if sys.unraisablehook is report_or_repeat:
            sys.unraisablehook = report
        if threading.current_thread() is threading.main_thread():
            for number in ours:
                if signal.getsignal(number) in (leave, signal.SIG_IGN):
                    signal.signal(number, signal.SIG_DFL)

    if ours:
        sys.unraisablehook = report_or_repeat
    for number in ours:
        signal.signal(number, leave)
    # Deliver signals that have arrived since `become`.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ours)
    return restore


def _is_in_finalizer(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def keep_freed_memory() -> None:
    """
    Have this process keep the memory that it frees, for its next allocations (glibc only; a variable `MALLOC_*` in the
    environment takes precedence).

    glibc returns blocks of more than 32 MiB, such as activations of a forward pass on a CPU, to Linux at once, and
    Linux then clears every page of the next block.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if sys.platform != "linux" or set_option is None or any(name.startswith("MALLOC_") for name in os.environ):
        return
    trim_threshold, mmap_max = -1, -4
    set_option(trim_threshold, -1)
    set_option(mmap_max, 0)


def become(argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """
    Replace this process by another program, which keeps the process id and so receives all signals itself.

    SIGTERM and SIGHUP stay pending until a Python program calls [`exit_on_signals`]; process 1 would lose earlier
    ones.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if argv[0] == sys.executable:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    os.execvpe(argv[0], argv, environment)


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """
    Send this process the signal `number` when its parent thread ends (Linux only). Other programs that this process
    becomes keep this, its own children do not.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, number)


def as_child(argv: Sequence[str]) -> list[str]:
    """
    Return a command that calls [`end_with_parent`] and becomes `argv`, for `subprocess`. Its `preexec_fn` would fork,
    which Linux refuses to a process that has mapped more memory than the machine has, and which can hang with threads.
    """
    return [sys.executable, "-m", "trl_qarl.processes", f"--parent={os.getpid()}", *argv]


if __name__ == "__main__":
    del sys.argv[0]
    if sys.argv[0].startswith("--parent="):
        end_with_parent()
        # The parent may have gone before.
        if sys.argv[0] != f"--parent={os.getppid()}":
            sys.exit(128 + signal.SIGTERM)
        os.execvp(sys.argv[1], sys.argv[1:])
    exit_on_signals()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
