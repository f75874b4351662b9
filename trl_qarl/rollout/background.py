"""Calls in a thread of their own, while the caller goes on."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from typing import Any


__all__ = ["BackgroundCall"]


class BackgroundCall:
    """
    A call in a daemon thread, or several, one after the other. A thread of `concurrent.futures` would be joined when
    the interpreter ends, so a trainer that dies would wait for its server.

    Args:
        in_thread (`bool`, *optional*, defaults to `True`):
            With `False` a call has ended when `start` returns.

    Attributes:
        seconds (`float`):
            How long it took.
    """

    def __init__(self, in_thread: bool = True):
        self.in_thread = in_thread
        self.seconds = 0.0
        self._outcome: Future | None = None

    @property
    def is_started(self) -> bool:
        return self._outcome is not None

    @property
    def is_running(self) -> bool:
        """True until there is an answer or an error."""
        return self._outcome is not None and not self._outcome.done()

    def start(self, function: Callable[[], Any]) -> None:
        """Call the `function`. What it raises is raised by `answer`."""
        self._outcome = Future()
        if self.in_thread:
            threading.Thread(target=self._run, args=(function,), name="trl-qarl-call", daemon=True).start()
        else:
            self._run(function)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end of the call, whatever comes of it, for at most `timeout` seconds."""
        if self._outcome is not None:
            wait([self._outcome], timeout)

    def answer(self, timeout: float | None = None) -> Any:
        """Wait for the answer; what the function raised is raised here, and `TimeoutError` after `timeout` seconds."""
        self.wait(timeout)
        return None if self._outcome is None else self._outcome.result(0)

    def fail(self, error: BaseException) -> None:
        """Have `answer` raise `error`, unless the call has ended. Its thread is left behind."""
        with suppress(InvalidStateError):
            self._outcome.set_exception(error)

    def _run(self, function: Callable[[], Any]) -> None:
        start = time.perf_counter()
        try:
            answer = function()
        except BaseException as error:
            self.seconds = time.perf_counter() - start
            self.fail(error)
            if not isinstance(error, Exception):
                raise
            return
        self.seconds = time.perf_counter() - start
        with suppress(InvalidStateError):
            self._outcome.set_result(answer)
