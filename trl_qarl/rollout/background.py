"""Calls in a thread of their own, while the caller goes on."""

import threading
import time
from collections.abc import Callable
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
        self._thread: threading.Thread | None = None
        self._answer: Any = None
        self._error: Exception | None = None

    @property
    def is_started(self) -> bool:
        """True once a thread was started."""
        return self._thread is not None

    @property
    def is_running(self) -> bool:
        """True until there is an answer or an error."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, function: Callable[[], Any]) -> None:
        """Call the `function`. What it raises is raised by `answer`."""
        if not self.in_thread:
            return self._run(function)
        self._thread = threading.Thread(target=self._run, args=(function,), name="trl-qarl-call", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the end of the call, whatever comes of it."""
        if self._thread is not None:
            self._thread.join()

    def answer(self) -> Any:
        """Wait for the answer; what the function raised is raised here."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._answer

    def _run(self, function: Callable[[], Any]) -> None:
        start = time.perf_counter()
        self._answer = self._error = None
        try:
            self._answer = function()
        except Exception as error:
            self._error = error
        self.seconds = time.perf_counter() - start
