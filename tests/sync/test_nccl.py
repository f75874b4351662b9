"""
Weights over NCCL to a server that dies, refuses or falls silent while the trainer waits in a broadcast, which NCCL
never ends.
"""

import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from testing_utils import failing_server
from testing_utils.children import start
from trl_qarl.engines import http_session
from trl_qarl.engines.background import BackgroundCall
from trl_qarl.engines.client import QaRLClient
from trl_qarl.engines.http_session import CheckedSession, ServerLost
from trl_qarl.sync import channels
from trl_qarl.sync.channels import NCCLChannel
from trl_qarl.wire.protocol import PublishError


pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


@pytest.fixture
def address():
    # In a process of its own, which may end.
    command = [sys.executable, failing_server.__file__]
    process = start(command, stdout=subprocess.PIPE, text=True)
    yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    process.kill()
    process.wait()
    process.stdout.close()


class Communicator:
    """Stands in for NCCL, whose broadcast ends when all have received, or with `error`, or never."""

    def __init__(self, ends=False, error=None):
        self.ends, self.error = ends, error
        self.entered, self.aborted = threading.Event(), threading.Event()
        self.sent = []
        self.group = SimpleNamespace()

    def broadcast(self, tensor, src, stream=None):
        self.entered.set()
        if self.error is not None:
            raise self.error
        if not self.ends:
            self.aborted.wait()
        self.sent.append(tensor.clone())

    def destroy(self):
        self.aborted.set()


@pytest.fixture
def broadcast(address, monkeypatch):
    """Send two tensors to a server of that behaviour through a communicator."""
    from vllm.distributed.weight_transfer import packed_tensor

    monkeypatch.setattr(channels, "GRACE_SECONDS", 3.0)
    monkeypatch.setattr(http_session, "REQUEST_SECONDS", 1.0)
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda index, count: (stream,) * count)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    for name, value in {
        "current_device_index": 0,
        "current_accelerator": torch.device("cpu"),
        "synchronize": None,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, lambda value=value: value)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)

    def send(behaviour, communicator):
        client = QaRLClient.__new__(QaRLClient)
        client.session, client.base_url = CheckedSession(), f"{address}/{behaviour}"
        client.communicator = communicator
        send.client = client
        NCCLChannel(client).send([("a", torch.ones(3)), ("b", torch.arange(4, dtype=torch.bfloat16))])

    return send


def test_a_broadcast_that_ends_has_sent_what_was_announced(broadcast):
    communicator = Communicator(ends=True)
    broadcast("receives", communicator)
    assert [len(sent) for sent in communicator.sent] == [3 * 4 + 4 * 2] and not communicator.aborted.is_set()
    assert broadcast.client._updating_weights is False


@pytest.mark.parametrize(
    ("behaviour", "error", "message"),
    [
        ("die", ServerLost, "/update_weights"),
        ("500", PublishError, "/update_weights failed with status 500: EngineCore"),
        ("hang", ServerLost, "did not answer .*/update_weights within 1 s"),
        ("receives", ServerLost, "NCCL did not end within 4 s"),
    ],
)
@pytest.mark.timeout(30)
def test_a_broadcast_that_never_ends_is_a_lost_server(broadcast, behaviour, error, message):
    communicator, start = Communicator(), time.monotonic()
    with pytest.raises(error, match=message):
        broadcast(behaviour, communicator)
    assert time.monotonic() - start < 20
    # It waits for the others, which a fast refusal comes before, and was told to stop.
    assert communicator.entered.wait(10) and communicator.aborted.is_set()


def test_an_error_of_nccl_is_a_lost_server(broadcast):
    with pytest.raises(ServerLost, match="NCCL failed: unhandled system error"):
        broadcast("receives", Communicator(error=RuntimeError("unhandled system error")))


def test_an_abandoned_call_does_not_answer_the_next():
    call, released = BackgroundCall(), threading.Event()
    call.start(released.wait)
    call.fail(OSError("given up"))
    call.start(lambda: (released.set(), time.sleep(0.2), "new")[-1])
    assert call.answer(10) == "new"


@pytest.mark.timeout(30)
def test_a_group_that_never_forms_is_formed_again(address, monkeypatch):
    from trl.generation import vllm_client

    monkeypatch.setattr(channels, "GRACE_SECONDS", 3.0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    released = threading.Event()
    monkeypatch.setattr(vllm_client, "open_trainer_endpoint", lambda info: released.wait() and Communicator())
    client = QaRLClient.__new__(QaRLClient)
    client.session, client.base_url = CheckedSession(), f"{address}/500"
    client.group_port, client.communicator = 51216, None
    monkeypatch.setattr(client, "get_server_info", lambda: {"weight_transfer_config": {}}, raising=False)
    monkeypatch.setattr(client, "get_world_size", lambda: 1, raising=False)
    with pytest.raises(PublishError, match="/init_weight_transfer_engine failed with status 500: EngineCore"):
        NCCLChannel(client, "cuda:0").connect()
    client.base_url = f"{address}/joins"
    formed = Communicator()
    monkeypatch.setattr(vllm_client, "open_trainer_endpoint", lambda info: formed)
    NCCLChannel(client, "cuda:0").connect()
    assert client.communicator is formed
    # The thread of the first attempt, which is given up.
    released.set()
