"""
Calls that join NCCL's group of trainer and workers, and end when the server has gone.

NCCL waits for all of a group without a time-out, and a worker joins while it answers a request. TRL's client posts
that request in a thread and joins in the caller, which would wait for ever for a server that has died or refused. Here
both are in threads, and the caller waits for the first of them that fails.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress

import torch

from .http_session import ServerLost


__all__ = ["fail", "join_group"]

GRACE_SECONDS = 30.0
"""Waited for NCCL after the time in which the server has to answer: it answers when it has received everything."""


def join_group(outcome: Future, function: Callable[[], None], request_timeout: float) -> None:
    """
    Call `function`, which posts a request and joins NCCL's group, and return when it has ended. Where it never does,
    it is left behind in a thread that does not keep the process from ending.

    Args:
        outcome (`Future`):
            What ends the call. Whoever posts the request has it [`fail`] when the server refuses.
        function (`Callable`):
            What is called.
        request_timeout (`float`):
            Seconds that the server has to answer the request.

    Raises:
        ServerLost: if NCCL fails or does not end in time.
        Exception: what the request has failed with.
    """
    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def join() -> None:
        try:
            if device is not None:
                # Every thread starts on the first device.
                torch.accelerator.set_device_index(device)
            function()
        except BaseException as error:
            fail(outcome, error)
        else:
            with suppress(InvalidStateError):
                outcome.set_result(None)

    threading.Thread(target=join, name="trl-qarl-nccl", daemon=True).start()
    seconds = request_timeout + GRACE_SECONDS
    try:
        outcome.result(seconds)
    except FutureTimeout as error:
        raise ServerLost(f"NCCL did not end within {seconds:g} s.") from error
    except (NotImplementedError, ServerLost):
        raise
    except (OSError, RuntimeError) as error:
        raise ServerLost(f"NCCL failed: {error}") from error


def fail(outcome: Future, error: BaseException) -> None:
    """Have the call that waits for `outcome` raise `error`, unless it has ended."""
    with suppress(InvalidStateError):
        outcome.set_exception(error)
