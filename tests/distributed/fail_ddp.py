"""
Trainings on two processes, each with an engine of its own, of which one fails at step 2. Run by shards.py. The fault
campaign has two processes that share a server.
"""

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch.distributed as dist
from sharded_runs import COLOCATED, train

from trl_qarl.rollout import generation
from trl_qarl.rollout.generation import QaRLVLLMGeneration
from trl_qarl.rollout.rewards import BadReward
from trl_qarl.trainer import qarl_trainer
from trl_qarl.wire.protocol import PublishError


class Engine:
    """An engine in this process and its publisher in one; fails at `what` from the third time on."""

    def __init__(self, what, failure):
        self.what, self.failure, self.version = what, failure, None
        self.counts = {"publish": 0, "generate": 0}

    def fails_at(self, what):
        self.counts[what] += 1
        fails = self.failure is not None and what == self.what and self.counts[what] > 2
        if fails and isinstance(self.failure, Exception):
            raise self.failure
        return fails

    def publish(self, version):
        self.fails_at("publish")
        self.version = version
        return {"publish/seconds": 0.0}

    def generate(self, prompts, sampling_params=None, **kwargs):
        logprob = SimpleNamespace(logprob=float("nan") if self.fails_at("generate") else -5.5, rank=1)
        tokens = [[17 + i + j for j in range(4)] for i in range(len(prompts))]
        return [
            SimpleNamespace(
                prompt_token_ids=prompt["prompt_token_ids"],
                outputs=[SimpleNamespace(token_ids=ids, logprobs=[{token: logprob} for token in ids])],
            )
            for prompt, ids in zip(prompts, tokens, strict=True)
        ]

    check_engine = forget = lambda self: {}
    weight_version = lambda self: self.version  # noqa: E731


def run(folder, name, what, failure):
    """What is raised in a training of this rank, and what it leaves."""

    class Generation(QaRLVLLMGeneration):
        def _build_engine(self):
            if what == "start" and dist.get_rank() == 1:
                raise ValueError("a port is taken")
            self.llm = self.engine = self.publisher = Engine(what, failure if dist.get_rank() else None)

    with patch.object(qarl_trainer, "QaRLVLLMGeneration", Generation), pytest.raises(Exception) as raised:
        next(train(folder, f"fails-{name}", **COLOCATED | {"max_steps": 4, "max_completion_length": 4}))
    files = {path.name for path in Path(folder, f"fails-{name}").glob("checkpoint-*/*")}
    return f"{raised.type.__name__}: {raised.value}", files


def what_fails_on_one_process_ends_both_with_a_checkpoint(folder):
    if find_spec("vllm") is None:
        return
    expected = {"trainer_state.json", "model.safetensors", "rollout_state_0.pt", "rollout_state_1.pt"}
    with patch.object(generation, "BACKOFF_SECONDS", 0.0):
        for name, what, failure, message in (
            ("publish", "publish", PublishError("a tensor differs"), "a tensor differs"),
            ("generate", "generate", RuntimeError("out of memory"), "RuntimeError: out of memory"),
            ("nan", "generate", "nan", "NaN"),
        ):
            raised, files = run(folder, name, what, failure)
            assert raised.startswith("EngineLost: ") and message in raised, (name, raised)
            dist.barrier()
            assert expected <= files, name
        raised, _ = run(folder, "start", "start", None)
        other = "RuntimeError: Another process failed with ValueError"
        assert raised.startswith("ValueError: a port is taken" if dist.get_rank() else other), raised


def what_fails_in_a_reward_of_one_process_is_raised_by_both(folder):
    def reward(completions, **kwargs):
        return [float(row) for row in range(len(completions) - dist.get_rank())]

    async def reward_later(**given):
        return reward(**given)

    for function in (reward, reward_later):
        with pytest.raises((BadReward, RuntimeError), match=f"'{function.__name__}' returned 3 rewards"):
            next(train(folder, "fails-reward", reward=function))
