"""Calls in a background thread."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from typing import Any


class BackgroundCall:
    """One call at a time in a daemon thread, with its duration in `seconds`. The interpreter joins threads of
    `concurrent.futures` when it ends, so a trainer that dies would wait for its server. Without `in_thread`, `start`
    returns after the end of the call."""

    def __init__(self, in_thread: bool = True):
        self.in_thread = in_thread
        self.seconds = 0.0
        self._outcome: Future | None = None

    @property
    def is_started(self) -> bool:
        return self._outcome is not None

    @property
    def is_running(self) -> bool:
        return self._outcome is not None and not self._outcome.done()

    def start(self, function: Callable[[], Any]) -> None:
        """Call `function`. An error of the call is raised by `answer`."""
        self._outcome = outcome = Future()
        if self.in_thread:
            threading.Thread(target=self._run, args=(function, outcome), name="trl-qarl-call", daemon=True).start()
        else:
            self._run(function, outcome)

    def wait(self, timeout: float | None = None) -> None:
        """Wait at most `timeout` seconds for the end of the call, without raising its error."""
        if self._outcome is not None:
            wait([self._outcome], timeout)

    def answer(self, timeout: float | None = None) -> Any:
        """Wait at most `timeout` seconds and return the result, or raise the call's error or `TimeoutError`."""
        self.wait(timeout)
        return None if self._outcome is None else self._outcome.result(0)

    def fail(self, error: BaseException) -> None:
        """Make `answer` raise `error`, unless the call has ended. Its thread keeps running."""
        with suppress(InvalidStateError):
            self._outcome.set_exception(error)

    def _run(self, function: Callable[[], Any], outcome: Future) -> None:
        start = time.perf_counter()
        try:
            answer = function()
        except BaseException as error:
            self.seconds = time.perf_counter() - start
            with suppress(InvalidStateError):
                outcome.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        self.seconds = time.perf_counter() - start
        with suppress(InvalidStateError):
            outcome.set_result(answer)


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """Return the result of `function`, called in a thread, or raise `TimeoutError`. The thread may go on."""
    call = BackgroundCall()
    call.start(function)
    return call.answer(seconds)
