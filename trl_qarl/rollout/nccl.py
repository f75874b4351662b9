"""
The channel over NCCL, whose calls end when the server has gone.

NCCL waits for all of a group without a time-out, and a worker joins while it answers a request. TRL's client posts
that request in a thread and joins in the caller, which would wait for ever for a server that has died or refused. Here
both are in threads, and the caller waits for the first of them that fails.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import partial

import torch

from ..wire.protocol import PublishError
from .engine import Channel, Tensors
from .http_session import ServerLost, refusals


__all__ = ["NCCLChannel", "fail"]

GRACE_SECONDS = 30.0
"""Waited for NCCL after the time in which the server has to answer: it answers when it has received everything."""


class NCCLChannel(Channel):
    """Broadcasts each chunk from this process' accelerator, `device`, over a group with the server's workers."""

    def __init__(self, client, device: torch.device | None = None):
        super().__init__(client)
        self.device = device

    def connect(self) -> None:
        """Form the group, again after a broadcast that failed, which leaves the two sides out of step."""
        self.client.close_communicator()
        self._join(partial(self.client.init_communicator, device=self.device))

    def send(self, tensors: Tensors) -> None:
        tensors = [(name, tensor.to(torch.accelerator.current_accelerator())) for name, tensor in tensors]
        metadata = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors]
        # NCCL reads them in other streams, which do not wait for the kernels that produce them.
        torch.accelerator.synchronize()
        # TRL's client then sends tensors and nothing else.
        self.client._updating_weights = True
        try:
            self._join(partial(self.client.update_named_params, metadata, iter(tensors)))
        finally:
            self.client._updating_weights = False

    def _join(self, function: Callable[[], None]) -> None:
        """Call `function`, which posts a request and joins the group; [`ServerLost`] if that does not end in time."""
        self.client.joining = Future()
        try:
            with refusals():
                _join_group(self.client.joining, function, self.client.session.request_timeout + GRACE_SECONDS)
        except (ServerLost, PublishError):
            # vLLM's gives up what it waits for.
            getattr(self.client.communicator, "destroy", lambda: None)()
            raise
        finally:
            self.client.joining = None


def _join_group(outcome: Future, function: Callable[[], None], seconds: float) -> None:
    """Return when `function` has ended or the request it posts has failed, which decides `outcome`. A thread that
    never ends is left behind; it does not keep the process from ending."""
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
