"""
Publication: after an optimizer step, give the engine exactly the low-bit tensors the learner computes with.

[`Publisher`] walks the model layer by layer, takes the fingerprint of every tensor, skips decoder layers in which nothing
changed, and hands chunks of bounded size to a [`Transport`]. The engine then compares what it holds with the fingerprints of
*all* tensors ([`trl_qarl.rollout.engine`]) and refuses to generate if anything differs.

| transport | between | how |
|---|---|---|
| [`FileTransport`] | trainer and server on one host, or hosts with a shared filesystem | safetensors files in one directory |
| [`NCCLTransport`] | GPUs of trainer and server | vLLM's NCCL weight transfer, through TRL's client |
| [`DirectTransport`] | trainer and engine in one process | the tensors themselves |
"""

import logging
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from ..export import has_stacked_experts, iter_checkpoint_tensors, quantization_config
from ..probe import learner_log_probs
from ..swap import low_bit_forward, quantized_layers
from .audit import (
    CANARY_TOKENS,
    config_differences,
    describe_model,
    describe_tokenizer,
    fingerprint,
    model_differences,
    sample_token_ids,
)
from .leftovers import owned_prefix, remove_leftovers
from .serve import check_transfer_dir


__all__ = [
    "DirectTransport",
    "FileTransport",
    "NCCLTransport",
    "PublishError",
    "Publisher",
    "Transport",
    "largest_chunk",
]

CHUNK_BYTES = 256 * 2**20
"""A chunk is sent when it holds this much; it is larger only when one decoder layer is."""

CANARY_LIMIT = 2.5
"""
Mean difference of the canary's log-probs, in nats, from which on the engine is taken to be broken: ten times the largest that
docs/alignment.md has for an aligned learner, 0.23 (`w8a8` in bf16).
"""

logger = logging.getLogger(__name__)

Tensors = list[tuple[str, torch.Tensor]]


class PublishError(RuntimeError):
    """A publication did not land; the engine does not generate until a complete one does."""


class Transport(Protocol):
    """How tensors reach an engine."""

    def describe(self) -> dict[str, Any]:
        """What the engine was built for: `quantization_config`, `dtype`, `logprobs_mode`, kernels."""

    def begin(self) -> list[str]:
        """
        Start an update. The engine does not generate from here on. Returns the names of tensors that the engine no longer holds
        as they were published.
        """

    def send(self, tensors: Tensors) -> None:
        """Deliver a chunk."""

    def finish(self, fingerprints: dict[str, str], weight_version: str) -> None:
        """End the update and raise [`PublishError`] unless the engine holds what the fingerprints say."""

    def score(self, token_ids: list[int]) -> list[float]:
        """The engine's log-probs of the tokens from the second on; NaN where there is none."""


class Publisher:
    """
    Publishes one model through one transport.

    Args:
        model (`nn.Module`):
            The learner, prepared by [`prepare_model`] or unquantized.
        dtype (`torch.dtype`):
            Dtype in which the engine runs the model; tensors that are not quantized are rounded to it.
        transport ([`Transport`]):
            The way to the engine.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`] or [`~transformers.ProcessorMixin`], *optional*):
            The learner's. With it the engine's tokenizer is compared, and log-probs of a fixed text after each publication.

    Raises:
        NotImplementedError: for a mixture-of-experts model whose experts are stacked in one tensor.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, transport: Transport, tokenizer=None):
        if has_stacked_experts(model):
            raise NotImplementedError(
                f"{type(model).__name__} keeps the matrices of all experts in one tensor, which vLLM's weight transfer does not "
                "take under that name. Use a dense model, or use_vllm=False."
            )
        self.model = model
        self.dtype = dtype
        self.transport = transport
        self.tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        self._canary = [] if self.tokenizer is None else sample_token_ids(self.tokenizer)[:CANARY_TOKENS]
        self._published: dict[str, str] = {}

    def forget(self) -> None:
        """Have the next publication send everything: the engine is a new one, or its state is unknown."""
        self._published = {}

    def check_engine(self) -> dict[str, Any]:
        """
        Compare scheme, group sizes, exclude list, dtype, log-prob mode, model configuration and tokenizer with the engine's, and
        return its description.

        Raises:
            ValueError: naming both values of everything that differs.
        """
        engine = self.transport.describe()
        ours = quantization_config(self.model) if quantized_layers(self.model) else {}
        problems = config_differences(ours, engine["quantization_config"])
        for name, value in (
            ("dtype", str(self.dtype).removeprefix("torch.")),
            ("logprobs_mode", "processed_logprobs"),
        ):
            if engine[name] != value:
                problems.append(f"{name}: learner {value!r}, engine {engine[name]!r}")
        config = getattr(self.model, "config", None)
        if config is not None:
            ours = describe_model(config.get_text_config())
            problems += model_differences("model", ours, engine.get("model") or {})
        if self.tokenizer is not None:
            ours = describe_tokenizer(self.tokenizer)
            problems += model_differences("tokenizer", ours, engine.get("tokenizer") or {})
        problems += _unsupported_settings(engine)
        has_fp8_scales = any(layer.scheme.has_fp8_scales for layer in quantized_layers(self.model).values())
        if has_fp8_scales and engine["tensor_parallel_size"] != 1:
            problems.append(
                f"scheme 'w4a8' needs tensor_parallel_size=1, the engine has {engine['tensor_parallel_size']}: vLLM would round the "
                "scales of each shard on its own"
            )
        if problems:
            raise ValueError(
                "The engine was not started for this learner:\n  "
                + "\n  ".join(problems)
                + "\nStart it with `trl-qarl "
                "vllm-serve` and the same model, tokenizer, scheme, group_size, exclude_modules and dtype."
            )
        return engine

    def publish(self, weight_version: str) -> dict[str, float]:
        """
        Send what changed since the last publication, check all of it, and return measurements.

        Returns:
            `publish/seconds`; `publish/audit_seconds`, the learner's share of it spent on fingerprints;
            `publish/megabytes` sent; `publish/tensors` sent; `publish/unchanged_tensors` not sent again; with a tokenizer
            `publish/canary_abs_logp`, the mean difference, in nats, between the engine's and the learner's log-probs of a fixed text.

        Raises:
            PublishError: if it did not land. The next call sends everything.
        """
        start, self._audit_seconds = time.perf_counter(), 0.0
        fingerprints: dict[str, str] = {}
        num_bytes = num_tensors = 0
        published, self._published = self._published, {}
        changed = [name for name in self.transport.begin() or [] if published.pop(name, None) is not None]
        if changed:
            logger.warning(
                "The engine no longer held what was published to it; something else writes into its memory. Sent again: %s",
                ", ".join(sorted({_layer_of(name) for name in changed})),
            )
        chunk: Tensors = []
        for layer in self._changed_layers(published, fingerprints):
            if chunk and _num_bytes(chunk) + _num_bytes(layer) > CHUNK_BYTES:
                self.transport.send(chunk)
                chunk = []
            chunk += layer
            num_bytes, num_tensors = num_bytes + _num_bytes(layer), num_tensors + len(layer)
        if chunk:
            self.transport.send(chunk)
        self.transport.finish(fingerprints, weight_version)
        canary = self._score_canary()
        self._published = fingerprints
        return {
            "publish/seconds": time.perf_counter() - start,
            "publish/audit_seconds": self._audit_seconds,
            "publish/megabytes": num_bytes / 2**20,
            "publish/tensors": num_tensors,
            "publish/unchanged_tensors": len(fingerprints) - num_tensors,
            **canary,
        }

    def _score_canary(self) -> dict[str, float]:
        """
        Compare log-probs of a fixed text: fingerprints do not reach the operands that kernels keep for themselves.

        Raises:
            PublishError: if engine and learner have nothing to do with each other.
        """
        if len(self._canary) < 2:
            return {}
        engine = torch.tensor(self.transport.score(self._canary))
        learner = self._canary_log_probs()
        difference = (engine - learner).abs().mean().item()
        # Also where it is not a number.
        if not difference <= CANARY_LIMIT:
            raise PublishError(
                f"After publication the engine's log-probs of {len(learner)} fixed tokens are {difference:.3g} nats from the "
                f"learner's on average, more than {CANARY_LIMIT}, although it holds the learner's tensors: one of the two computes "
                f"nonsense, or a kernel works with a copy of other weights. Engine: {_rounded(engine)}; learner: {_rounded(learner)}."
            )
        return {"publish/canary_abs_logp": difference}

    def _canary_log_probs(self) -> torch.Tensor:
        ids = torch.tensor(self._canary, device=next(self.model.parameters()).device)
        # The engine runs low-bit weights also where the learner does not.
        autocast = torch.autocast(ids.device.type, self.dtype, enabled=self.dtype is not torch.float32)
        with low_bit_forward(self.model), autocast:
            log_probs = learner_log_probs(self.model, ids, len(ids) - 1)
        return log_probs.gather(1, ids[1:, None])[:, 0].cpu()

    def _changed_layers(self, published: dict[str, str], fingerprints: dict[str, str]) -> Iterator[Tensors]:
        tensors = iter_checkpoint_tensors(self.model, self.dtype)
        for _, members in groupby(tensors, key=lambda item: _layer_of(item[0])):
            layer = list(members)
            start = time.perf_counter()
            current = {name: fingerprint(tensor) for name, tensor in layer}
            self._audit_seconds += time.perf_counter() - start
            fingerprints.update(current)
            # An engine fuses matrices of a layer, so a layer is sent whole or not at all.
            if any(published.get(name) != value for name, value in current.items()):
                yield layer


class DirectTransport:
    """
    Hands tensors to an engine in this process.

    Args:
        llm (`vllm.LLM`):
            Engine whose worker runs in this process (`distributed_executor_backend` `"uni"` or `"external_launcher"`).
    """

    def __init__(self, llm):
        self.llm = llm
        worker = llm.llm_engine.model_executor.driver_worker
        self._worker = getattr(worker, "worker", worker)

    def describe(self) -> dict[str, Any]:
        return self._worker.qarl_describe()

    def begin(self) -> list[str]:
        self._abort_requests()
        try:
            changed = self._worker.qarl_begin()
        except RuntimeError as error:
            raise PublishError(str(error)) from error
        self._worker.start_weight_update()
        return changed

    def _abort_requests(self) -> None:
        """A rollout that was interrupted left requests, which would come back with the next one's and keep their cache."""
        engine = self.llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        if not self.llm.reset_prefix_cache():
            raise PublishError(
                "vLLM could not empty its prefix cache, which holds keys and values of the old weights: a rollout was interrupted "
                "in the middle of a step. Build the engine again."
            )
        # Embeddings of images, computed with the old weights.
        self.llm.reset_mm_cache()
        engine.reset_encoder_cache()

    def send(self, tensors: Tensors) -> None:
        from vllm.config import set_current_vllm_config

        engine = self._worker.weight_transfer_engine
        with set_current_vllm_config(self._worker.vllm_config):
            try:
                engine.load((name, tensor.to(engine.device)) for name, tensor in tensors)
            except Exception as error:
                # vLLM's loaders raise whatever comes of a name or shape they do not expect.
                raise PublishError(
                    f"The engine could not load {tensors[0][0]} to {tensors[-1][0]}: {type(error).__name__}: {error}"
                ) from error

    def finish(self, fingerprints: dict[str, str], weight_version: str) -> None:
        self._worker.qarl_expect(fingerprints)
        try:
            self._worker.finish_weight_update()
        except RuntimeError as error:
            raise PublishError(str(error)) from error
        self.llm.update_weight_version(weight_version)

    def score(self, token_ids: list[int]) -> list[float]:
        from vllm import SamplingParams

        if self.llm.llm_engine.is_sleeping():
            # The weights are awake; what follows a publication is a rollout, which needs the cache too.
            self.llm.wake_up(tags=["kv_cache"])
        # Greedy: a sample would move the random state of the rollout.
        parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
        (output,) = self.llm.generate([{"prompt_token_ids": token_ids}], parameters, use_tqdm=False)
        return [
            entry[token].logprob if entry else math.nan
            for entry, token in zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
        ]


class _ServerTransport:
    """The requests that every transport to a server makes; `client` is a [`~trl_qarl.rollout.client.QaRLClient`]."""

    def __init__(self, client):
        self.client = client

    def describe(self) -> dict[str, Any]:
        return self.client.call_workers("qarl_describe")[0]

    def begin(self) -> list[str]:
        # Requests of other clients must not be finished with other weights than they were begun with.
        self.client.control("/pause?mode=abort")
        # Each rank names what it has lost.
        changed = {name for names in self.client.call_workers("qarl_begin") for name in names or []}
        self.client.control("/start_weight_update")
        return sorted(changed)

    def finish(self, fingerprints: dict[str, str], weight_version: str) -> None:
        self.client.call_workers("qarl_expect", fingerprints=fingerprints)
        # The cache goes before the gate opens.
        reset = self.client.control("/reset_prefix_cache")
        if reset.content and not reset.json().get("success", True):
            raise PublishError(
                "/reset_prefix_cache: the server could not empty its prefix cache, which holds keys and values of the old weights."
            )
        self.client.control("/finish_weight_update", {"weight_version": weight_version})
        self.client.control("/resume")
        stamped = self.client.weight_version()
        if stamped != weight_version:
            raise PublishError(f"Published weight version {weight_version!r}, but the server says {stamped!r}.")

    def score(self, token_ids: list[int]) -> list[float]:
        body = {
            "model": self.client.model,
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        entries = self.client.control("/v1/completions", body).json()["choices"][0].get("prompt_logprobs")
        if not entries or len(entries) != len(token_ids):
            raise PublishError("/v1/completions: the server returned no log-probs of the prompt.")
        values = [(entry or {}).get(str(token), {}) for entry, token in zip(entries[1:], token_ids[1:], strict=True)]
        return [math.nan if value.get("logprob") is None else value["logprob"] for value in values]


class FileTransport(_ServerTransport):
    """Writes each chunk to the server's transfer directory, which must be the same directory on both hosts."""

    def begin(self) -> list[str]:
        directory = self.client.transfer_dir
        if not directory or not os.access(directory, os.W_OK | os.X_OK):
            raise PublishError(
                f"The server takes weights from {directory!r}, which this host cannot write to. Start the server with "
                "`trl-qarl vllm-serve --transfer_dir DIR`, where DIR is a directory both hosts share."
            )
        check_transfer_dir(directory)
        # What killed trainers left. Another server may take weights from the same directory, and its trainer's files stay.
        remove_leftovers(directory, also=self.client.instance)
        return super().begin()

    def send(self, tensors: Tensors) -> None:
        directory = self.client.transfer_dir
        try:
            path = self._write(tensors, directory)
        except (OSError, SafetensorError) as error:
            raise PublishError(_cannot_write(directory, _num_bytes(tensors), error)) from error
        try:
            self.client.control("/update_weights", {"update_info": {"file": path.name}})
        finally:
            path.unlink(missing_ok=True)

    def _write(self, tensors: Tensors, directory: str) -> Path:
        # In a folder of its own, as safetensors writes to a temporary file first and chooses the mode of the file.
        folder = Path(tempfile.mkdtemp(prefix=f"{owned_prefix()}{self.client.instance}-", dir=directory))
        try:
            written = folder / "chunk.safetensors"
            save_file({name: tensor.cpu().contiguous() for name, tensor in tensors}, written)
            written.chmod(0o600)
            return written.rename(folder.with_name(f"{folder.name}.safetensors"))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class NCCLTransport(_ServerTransport):
    """Broadcasts each chunk over the group that `client.init_communicator` has formed."""

    def send(self, tensors: Tensors) -> None:
        tensors = [(name, tensor.to(torch.accelerator.current_accelerator())) for name, tensor in tensors]
        metadata = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors]
        # Within an update that has been started, TRL's client sends tensors and nothing else.
        self.client._updating_weights = True
        try:
            self.client.update_named_params(metadata, iter(tensors))
        finally:
            self.client._updating_weights = False


def largest_chunk(model: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of the largest chunk that publishing `model`, which may be on the meta device, can take; an upper bound."""
    sizes = [
        sum(
            tensor.numel() * (dtype.itemsize if tensor.is_floating_point() else tensor.itemsize) for _, tensor in layer
        )
        for _, layer in groupby(model.state_dict().items(), key=lambda item: _layer_of(item[0]))
    ]
    return min(sum(sizes), max(CHUNK_BYTES, *sizes))


def _cannot_write(directory: str, num_bytes: int, error: Exception) -> str:
    try:
        free = f"{shutil.disk_usage(directory).free / 2**20:.0f} MiB are free there"
    except OSError as missing:
        free = str(missing)
    return (
        f"A chunk of weights of {num_bytes / 2**20:.1f} MiB could not be written to the transfer directory {directory!r} ({error}); "
        f"{free}. Make room, start the server with `trl-qarl vllm-serve --transfer_dir DIR` on a larger file system, or give a "
        "container more shared memory (`docker run --shm-size 2g`)."
    )


def _unsupported_settings(engine: Mapping[str, Any]) -> list[str]:
    """Settings of an engine, wherever they came from, with which it would not sample from the published weights."""
    lines = []
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        if engine.get(name, 1) != 1:
            lines.append(f"{name}: 1 is supported, the engine has {engine[name]}: the audit sees whole models only")
    if engine.get("kv_cache_dtype", "auto") not in ("auto", engine["dtype"]):
        lines.append(
            f"kv_cache_dtype: the learner keeps keys and values in {engine['dtype']!r}, engine {engine['kv_cache_dtype']!r}"
        )
    if engine.get("is_speculative"):
        lines.append("speculative_config: not supported, as no weights are published to a draft model")
    if engine.get("use_w4a8"):
        lines.append(
            "activations: the learner does not quantize them, but the engine's INT4 kernel rounds them to 8 bits, as vLLM does on CPUs "
            "with AMX. Set VLLM_CPU_INT4_W4A8=0 in its environment"
        )
    return lines


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 3) for value in values.tolist()]


def _num_bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for _, tensor in tensors)


def _layer_of(name: str) -> str:
    """What must be sent together: the name up to its first number, such as `"model.layers.3"`, else its module."""
    match = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)
    return match.group() if match else name.rpartition(".")[0] or name
