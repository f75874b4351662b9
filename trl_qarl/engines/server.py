"""vLLM in a server: the trainer's side of the engine, and the command and process of a server for a learner."""

import json
import math
import secrets
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..bitwise.attach import has_engine_numerics
from ..bitwise.low_bit import choose_cpu_weights
from ..wire.protocol import CPU_WEIGHTS_VARIABLE, PublishError
from ..wire.transfer_dir import default_transfer_dir, owned_prefix
from .engine import Channel, Tensors
from .http_session import json_of
from .pictures import PICTURE_PATH, check_prompt, picture_request
from .server_command import build_server_command
from .server_process import ServerProcess
from .spec import EngineSpec


class ServerEngine:
    """The [`~trl_qarl.engines.engine.Engine`] of a server with identical replicas."""

    in_every_process = False

    def __init__(self, client, channel: Channel):
        self.client, self.channel = client, channel
        self.works_meanwhile = channel.works_meanwhile
        self._replicas = 1

    def describe(self) -> dict[str, Any]:
        first, *others = self.client.call_workers("qarl_describe")
        for other in others:
            names = differing_settings(first, other)
            # The fingerprints compare the ranks of one replica.
            if names and (replica := other.get("replica")) != first.get("replica"):
                raise ValueError(f"Replica {replica} of the server differs from the first one in: {', '.join(names)}.")
        self._replicas = len({worker.get("replica") for worker in (first, *others)})
        return {**first, "replicas": self._replicas}

    def begin(self) -> list[str]:
        self.channel.begin()
        # Abort other clients' requests, which would go on with the new weights.
        self.client.control("/pause?mode=abort")
        # Union over ranks.
        changed = {name for names in self.client.call_workers("qarl_begin") for name in names or []}
        self.client.control("/start_weight_update")
        return sorted(changed)

    def send(self, tensors: Tensors) -> None:
        self.channel.send(tensors)

    def finish(self, fingerprints: dict[str, str], weight_version: str) -> None:
        self.client.call_workers("qarl_finish", fingerprints=fingerprints)
        # Empty the cache before the gate opens.
        reset = self.client.control("/reset_prefix_cache")
        if reset.content and not json_of(reset, PublishError).get("success", True):
            raise PublishError(
                "/reset_prefix_cache: the server could not empty its prefix cache, which holds keys and values of the old weights."
            )
        self.client.control("/finish_weight_update", {"weight_version": weight_version})
        self.client.control("/resume")
        stamped = self.weight_version()
        if stamped != weight_version:
            raise PublishError(f"Published weight version {weight_version!r}, but the server says {stamped!r}.")

    def weight_version(self) -> str:
        return self.client.weight_version()

    def generate(self, prompts: list[list[int]], pictures: Sequence[Any] | None = None, *args, **sampling):
        # The method of the class: the trainer has replaced the client's by one that calls this.
        return type(self.client).generate(self.client, prompts, pictures, *args, **sampling)

    def score(self, token_ids: list[int], pictures: Sequence[Any] = ()) -> list[float]:
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        path, body = "/v1/completions", {"model": self.client.model, "prompt": token_ids, **sampling}
        if pictures:
            path, body = PICTURE_PATH, picture_request(self.client.model, token_ids, pictures, **sampling)
        scores = []
        for replica in range(self._replicas):
            answered = self.client.control(path, body, {"X-data-parallel-rank": str(replica)})
            answer = json_of(answered, PublishError)
            if pictures:
                check_prompt(answer.get("prompt_token_ids"), token_ids)
            entries = (answer if pictures else answer["choices"][0]).get("prompt_logprobs")
            if not entries or len(entries) != len(token_ids):
                raise PublishError(f"{path}: the server returned no log-probs of the prompt.")
            for entry, token in zip(entries[1:], token_ids[1:], strict=True):
                value = (entry or {}).get(str(token), {}).get("logprob")
                scores.append(math.nan if value is None else value)
        return scores

    def clear_cache(self) -> None:
        self.client.call_workers("qarl_clear_cache")

    def close_session(self) -> None:
        """Call [`~trl_qarl.engines.client.QaRLClient.close_session`]."""
        self.client.close_session()

    def reconnect(self, timeout: float) -> bool:
        """Call [`~trl_qarl.engines.client.QaRLClient.reconnect`], then connect the channel."""
        is_other = self.client.reconnect(timeout)
        self.channel.connect()
        return is_other

    def rejoin(self) -> bool:
        """Return `False`: a lost server raises. [`~trl_qarl.engines.servers.Servers`] takes lost ones in again."""
        return False


def differing_settings(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of settings in which two workers' descriptions differ, except those that are a worker's own."""
    # One of them may have been restarted.
    alike = sorted(first.keys() - {"device", "published", "replica"})
    return [name for name in alike if other.get(name) != first[name]]


def start_command(args, spec: EngineSpec) -> str:
    """Return the command with which a user starts a server for the learner of a [`QaRLConfig`]."""
    revision = (args.model_init_kwargs or {}).get("revision")
    options = {
        "model": spec.model,
        "revision": revision if revision != "main" else None,
        "scheme": args.scheme if isinstance(args.scheme, str) else json.dumps(args.plan.option_value),
        "group_size": args.group_size if isinstance(args.scheme, str) else None,
        "exclude_modules": args.exclude_modules,
        "dtype": spec.dtype,
        "max_lora_rank": spec.lora.get("max_lora_rank"),
        "numerics": None if spec.numerics == "fast" else spec.numerics,
        "port": None if args.vllm_server_base_url else args.vllm_server_port,
    }
    argv = ["trl-qarl", "vllm-serve"]
    for name, value in options.items():
        if value:
            argv += [f"--{name}", *(map(str, value) if isinstance(value, list | tuple) else [str(value)])]
    return shlex.join(argv)


def server_process(args, spec: EngineSpec, model: nn.Module, chunk_bytes: int) -> ServerProcess:
    """Return the server of `vllm_server_autostart=True`, not yet started, for the learner `model` of a [`QaRLConfig`]
    that sends chunks of at most `chunk_bytes`."""
    vllm_args = []
    if args.vllm_max_model_length is not None:
        vllm_args += ["--max-model-len", str(args.vllm_max_model_length)]
    on_cpu = args.use_cpu or not torch.cuda.is_available()
    if not on_cpu:
        vllm_args += ["--gpu-memory-utilization", str(args.vllm_gpu_memory_utilization)]
        vllm_args += ["--tensor-parallel-size", str(args.vllm_tensor_parallel_size)]
    if args.trust_remote_code:
        vllm_args.append("--trust-remote-code")
    # The name lets the next trainer see whether this one was killed.
    name = f"{owned_prefix()}{secrets.token_hex(8)}"
    argv, environment = build_server_command(
        spec,
        port=args.vllm_server_port,
        on_cpu=on_cpu,
        # NCCL refuses two processes on one GPU, and by default the server uses the trainer's.
        transport="file",
        transfer_dir=default_transfer_dir(args.vllm_server_port, chunk_bytes).with_name(name),
        vllm_args=vllm_args,
    )
    if on_cpu:
        dtype, copies = getattr(torch, spec.dtype), 1 + has_engine_numerics(model)
        environment[CPU_WEIGHTS_VARIABLE] = choose_cpu_weights(model, dtype, copies, is_trained=True)
    return ServerProcess(argv, environment, Path(args.output_dir) / "vllm_server.log")
