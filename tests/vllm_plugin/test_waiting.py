"""Processes of vLLM that wait for each other's messages."""

import time

import pytest

from trl_qarl.vllm_plugin import register


pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


def test_a_process_that_waits_on_a_cpu_sleeps():
    """vLLM's own returns at once for a second after each message, to be called again."""
    import zmq
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.utils.network_utils import get_open_zmq_ipc_path

    register()
    reader = SpinCondition(is_reader=True, context=zmq.Context.instance(), notify_address=get_open_zmq_ipc_path())
    reader.record_read()
    time.sleep(0.01)
    start = time.monotonic()
    reader.wait(timeout_ms=50)
    assert time.monotonic() - start > 0.04
