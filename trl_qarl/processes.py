"""
The end of a command by a signal, and of the processes that it started. Needs no torch.

`python -m trl_qarl.processes MODULE ...` runs a module of somebody else with these handlers, until it installs its
own.

Linux gives process 1 of a container only those signals that it has a handler for. A command without one would sleep
through `docker stop`, and so would the trainer that it started.
"""

import ctypes
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn


__all__ = ["become", "end_with_parent", "exit_on_signals"]

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def exit_on_signals() -> Callable[[], None]:
    """
    Have SIGTERM and SIGHUP end this process as Ctrl-C does, through every `finally`, with exit code 128 and the
    signal's number; returns what undoes it.

    A handler that somebody else has installed stays, and a signal that is ignored, as `nohup` does, stays ignored.
    In another thread than the main one nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    ours = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]

    def leave(signum, frame):
        # `timeout` and others send it twice, and the second one must not interrupt the cleaning up after the first.
        for number in ours:
            signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + signum)

    def restore():
        if threading.current_thread() is threading.main_thread():
            for number in ours:
                if signal.getsignal(number) in (leave, signal.SIG_IGN):
                    signal.signal(number, signal.SIG_DFL)

    for number in ours:
        signal.signal(number, leave)
    # Signals that arrived since `become`.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ours)
    return restore


def become(argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """
    Replace this process by another program, which keeps its number and so gets all signals itself.

    SIGTERM and SIGHUP wait until a Python program calls [`exit_on_signals`]; process 1 would lose those that come
    before.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if argv[0] == sys.executable:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    os.execvpe(argv[0], argv, environment)


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> Callable[[], object]:
    """
    Return a function for a child to call, after which Linux sends it `number` when the thread that started it is
    gone, however that happens. The child's own children know nothing of it. Does nothing on other systems.
    """
    if sys.platform != "linux":
        return lambda: None
    prctl = ctypes.CDLL(None).prctl
    set_parent_death_signal = 1
    return lambda: prctl(set_parent_death_signal, number)


if __name__ == "__main__":
    exit_on_signals()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
