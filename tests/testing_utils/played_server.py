"""A server that a trainer may lose, played by an object, whose completions depend on weights and prompts."""

import hashlib
import random

import torch

from testing_utils import make_vllm_trainer
from trl_qarl.checkpoint.layout import iter_checkpoint_tensors
from trl_qarl.engines.http_session import ServerLost
from trl_qarl.engines.server import ServerEngine
from trl_qarl.rollout import generation
from trl_qarl.rollout.generation import QaRLVLLMGeneration
from trl_qarl.sync.channels import FileChannel
from trl_qarl.trainer import qarl_trainer


class Server:
    """Client, publisher and server process in one: dies on command, counts what is asked, holds what is published."""

    base_url = "http://server"

    def __init__(self, model):
        self.model = model
        self.is_alive, self.version, self.held = True, None, None
        self.num_starts = self.num_requests = 0
        self.failures = {}
        self.spoils = []

    def ask(self, what):
        self.num_requests += 1
        failures = self.failures.get(what, [])
        failure = failures.pop(0) if failures else None
        if failure == "die":
            self.is_alive, self.version = False, None
        elif failure is not None:
            raise failure
        if not self.is_alive:
            raise ServerLost(f"no server answers {what}")

    # What the client does.
    def generate(self, prompts, features=None, n=1, max_tokens=16, **kwargs):
        self.ask("generate")
        assert self.version is not None, "weights were never published to this server"
        self.asked = prompts, features
        # Completions depend on the weights and prompts alone, as those of a seeded engine.
        draw = random.Random(f"{self.held} {prompts}")
        tokens = [[draw.randrange(5, 250) for _ in range(max_tokens)] for _ in range(n * len(prompts))]
        answer = {
            "prompt_ids": prompts,
            "completion_ids": tokens,
            "logprobs": [[[-5.5] for _ in ids] for ids in tokens],
            "logprob_token_ids": [[[token] for token in ids] for ids in tokens],
        }
        spoil = self.spoils.pop(0) if self.spoils else None
        if spoil is not None:
            spoil(answer)
        return answer

    def image_features(self, images):
        return images

    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def weight_version(self):
        self.ask("version")
        return self.version

    def is_healthy(self):
        return self.is_alive

    @property
    def is_running(self):
        return self.is_alive

    def reconnect(self, timeout):
        self.ask("reconnect")
        return True

    def close_session(self):
        pass

    # What the publisher does.
    def publish(self, version):
        self.ask("publish")
        digest = hashlib.sha256()
        for name, tensor in iter_checkpoint_tensors(self.model, torch.float32):
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        self.version, self.held = version, digest.hexdigest()
        return {"publish/seconds": 0.0}

    def forget(self):
        pass

    def check_engine(self):
        self.ask("describe")
        return {"device": "nowhere", "kernels": {}}

    # What the server's process does.
    def start(self):
        self.num_starts += 1
        failures = self.failures.get("start", [])
        if failures:
            raise failures.pop(0)
        self.is_alive = True

    def wait(self, url, timeout):
        pass

    def stop(self):
        self.is_alive = False


def play_servers(folder, monkeypatch):
    """A function that makes a trainer below `folder` and its server, until the monkeypatch is undone."""
    monkeypatch.setattr(generation, "BACKOFF_SECONDS", 0.0)

    class Generation(QaRLVLLMGeneration):
        def _connect(self):
            self.vllm_client = self.publisher = self.server = client = Server(self.model)
            self.engine = ServerEngine(client, FileChannel(client))
            client.generate = self._completions

    monkeypatch.setattr(qarl_trainer, "QaRLVLLMGeneration", Generation)

    def make(name="run", **arguments):
        defaults = {"vllm_mode": "server", "steps_per_generation": 1, "max_completion_length": 4, "seed": 3}
        trainer = make_vllm_trainer(folder / name, "llama", **(defaults | arguments))
        return trainer, trainer.vllm_generation.vllm_client

    return make


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
