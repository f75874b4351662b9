"""Rollout errors, further attempts, and raising one rank's error on all ranks."""

import logging
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from accelerate.utils import gather_object

from ..engines.http_session import ServerLost
from ..wire.protocol import PublishError


logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
"""Attempts at a publication or a generation before giving up."""


class EngineLost(RuntimeError):
    """
    The engine could not take the weights or did not generate; a server failed in all of [`MAX_ATTEMPTS`] attempts.
    `is_recoverable` is true if another publication may bring the engine back.

    Iterating over this error raises it: the main process sends it to the others in place of completions, so that all
    of them stop at the same line instead of waiting for each other.
    """

    def __init__(self, *args, is_recoverable: bool = False):
        super().__init__(*args)
        self.is_recoverable = is_recoverable

    def __iter__(self):
        raise self


class PromptTooLong(EngineLost):
    """A prompt leaves no room for a completion in the engine's context."""


@contextmanager
def all_or_none(accelerator):
    """While open, an error of one process is raised by all, which would otherwise wait for it at their next
    collective. Every process has to open it, and a collective inside must fail for all processes alike."""
    failure = for_others = None
    try:
        yield
    except Exception as error:
        failure = error
        # Not every error can be pickled.
        notes = " ".join(getattr(error, "__notes__", []))
        for_others = RuntimeError(f"Another process failed with {type(error).__name__}: {error} {notes}".rstrip())
        if isinstance(error, EngineLost):
            for_others = type(error)(str(error))
    failures = gather_object([for_others])
    culprit = next((rank for rank, error in enumerate(failures) if error is not None), None)
    if culprit is not None:
        # All ranks must raise the same class, because their handlers may run collectives.
        raise failure if culprit == accelerator.process_index else failures[culprit]


def to_engine_lost(error: Exception, doing: str) -> EngineLost:
    """Return the error that ended `doing` as [`EngineLost`]; an unexpected error is logged with its traceback."""
    if isinstance(error, EngineLost):
        return error
    if not isinstance(error, (ServerLost, PublishError, ValueError)):
        logger.error("%s unexpectedly", doing, exc_info=error)
        return EngineLost(f"{doing}: {type(error).__name__}: {error}")
    return EngineLost(f"{doing}: {error}", is_recoverable=isinstance(error, (ServerLost, PublishError)))


def with_retries(doing: str, attempt: Callable[[int], Any]) -> Any:
    """
    Return the result of the first `attempt` that does not lose the engine. Each attempt gets the number of earlier
    failures, and has to get the engine back if there are any. [`EngineLost`] is raised after [`MAX_ATTEMPTS`], or at
    once if another publication would not help.
    """
    for failed in range(MAX_ATTEMPTS):
        try:
            return attempt(failed)
        except Exception as error:
            # Not only of a lost engine: a server started in its place may not fit the learner.
            lost = to_engine_lost(error, f"{doing} failed")
            if not lost.is_recoverable:
                raise lost from error
            logger.warning("Attempt %d of %d: %s", failed + 1, MAX_ATTEMPTS, lost)
    last = str(lost).removeprefix(f"{doing} failed: ")
    raise EngineLost(f"{doing} failed {MAX_ATTEMPTS} times. The last error: {last}")
