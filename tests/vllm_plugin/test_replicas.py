"""Answers of the replicas of a server; sync/test_vllm_replicas.py has a real one."""

import asyncio

import pytest


pytest.importorskip("vllm")

from vllm.v1.engine.core_client import DPLBAsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError

from trl_qarl.vllm_plugin import call_every_replica, register
from trl_qarl.wire import handshake
from trl_qarl.wire.handshake import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE


pytestmark = pytest.mark.vllm


class Client:
    """Each engine answers with what it is given, or raises it."""

    def __init__(self, *answers):
        self.core_engines, self.answers = [b"\x00\x00", b"\x01\x00", b"\x02\x00"][: len(answers)], answers

    async def _call_utility_async(self, method, *args, engine):
        answer = self.answers[self.core_engines.index(engine)]
        if isinstance(answer, Exception):
            raise answer
        return answer


def ask(method, *answers):
    return asyncio.run(call_every_replica(Client(*answers), method))


def test_questions_need_answers_of_all_replicas():
    assert ask("collective_rpc", [{"replica": 0}, 1], [{"replica": 1}, 2]) == [{"replica": 0}, 1, {"replica": 1}, 2]
    assert ask("reset_prefix_cache", True, True) is True
    assert ask("reset_prefix_cache", True, False) is False
    assert ask("get_weight_version", "3", "3") == "3" and ask("resume_scheduler", None, None) is None


def test_a_replica_that_fails_or_differs_is_named():
    with pytest.raises(RuntimeError, match="Replica 1 of 2: it lost a tensor"):
        ask("collective_rpc", [None], Exception("it lost a tensor"))
    with pytest.raises(RuntimeError, match="'get_weight_version'"):
        ask("get_weight_version", "3", "2")
    # vLLM ends a server whose engine has gone.
    with pytest.raises(EngineDeadError):
        ask("collective_rpc", [None], EngineDeadError())


def test_only_servers_of_ours_hear_all(monkeypatch):
    monkeypatch.setattr(DPLBAsyncMPClient, "call_utility_async", theirs := object())
    monkeypatch.setattr(handshake, "_taken", None)
    for variable in (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    register()
    assert DPLBAsyncMPClient.call_utility_async is theirs
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, "x")
    register()
    assert DPLBAsyncMPClient.call_utility_async is call_every_replica
