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

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from ..export import has_stacked_experts, iter_checkpoint_tensors, quantization_config
from ..swap import quantized_layers
from .audit import config_differences, fingerprint
from .leftovers import owned_prefix, remove_leftovers


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

Tensors = list[tuple[str, torch.Tensor]]


class PublishError(RuntimeError):
    """A publication did not land; the engine does not generate until a complete one does."""


class Transport(Protocol):
    """How tensors reach an engine."""

    def describe(self) -> dict[str, Any]:
        """What the engine was built for: `quantization_config`, `dtype`, `logprobs_mode`, kernels."""

    def begin(self) -> None:
        """Start an update. The engine does not generate from here on."""

    def send(self, tensors: Tensors) -> None:
        """Deliver a chunk."""

    def finish(self, fingerprints: dict[str, str], weight_version: str) -> None:
        """End the update and raise [`PublishError`] unless the engine holds what the fingerprints say."""


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

    Raises:
        NotImplementedError: for a mixture-of-experts model whose experts are stacked in one tensor.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, transport: Transport):
        if has_stacked_experts(model):
            raise NotImplementedError(
                f"{type(model).__name__} keeps the matrices of all experts in one tensor, which vLLM's weight transfer does not "
                "take under that name. Use a dense model, or use_vllm=False."
            )
        self.model = model
        self.dtype = dtype
        self.transport = transport
        self._published: dict[str, str] = {}

    def forget(self) -> None:
        """Have the next publication send everything: the engine is a new one, or its state is unknown."""
        self._published = {}

    def check_engine(self) -> dict[str, Any]:
        """
        Compare scheme, group sizes, exclude list, dtype and log-prob mode with the engine's, and return its description.

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
                "vllm-serve` and the same model, scheme, group_size, exclude_modules and dtype."
            )
        return engine

    def publish(self, weight_version: str) -> dict[str, float]:
        """
        Send what changed since the last publication, check all of it, and return measurements.

        Returns:
            `publish/seconds`; `publish/audit_seconds`, the learner's share of it spent on fingerprints;
            `publish/megabytes` sent; `publish/tensors` sent; `publish/unchanged_tensors` not sent again.

        Raises:
            PublishError: if it did not land. The next call sends everything.
        """
        start, self._audit_seconds = time.perf_counter(), 0.0
        fingerprints: dict[str, str] = {}
        num_bytes = num_tensors = 0
        published, self._published = self._published, {}
        self.transport.begin()
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
        self._published = fingerprints
        return {
            "publish/seconds": time.perf_counter() - start,
            "publish/audit_seconds": self._audit_seconds,
            "publish/megabytes": num_bytes / 2**20,
            "publish/tensors": num_tensors,
            "publish/unchanged_tensors": len(fingerprints) - num_tensors,
        }

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

    def begin(self) -> None:
        self._worker.qarl_begin()
        self._worker.start_weight_update()

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
        self.llm.reset_prefix_cache()
        self.llm.update_weight_version(weight_version)


class _ServerTransport:
    """The requests that every transport to a server makes; `client` is a [`~trl_qarl.rollout.client.QaRLClient`]."""

    def __init__(self, client):
        self.client = client

    def describe(self) -> dict[str, Any]:
        return self.client.call_workers("qarl_describe")[0]

    def begin(self) -> None:
        # Requests of other clients must not be finished with other weights than they were begun with.
        self.client.control("/pause?mode=abort")
        self.client.call_workers("qarl_begin")
        self.client.control("/start_weight_update")

    def finish(self, fingerprints: dict[str, str], weight_version: str) -> None:
        self.client.call_workers("qarl_expect", fingerprints=fingerprints)
        # The cache goes before the gate opens.
        self.client.control("/reset_prefix_cache")
        self.client.control("/finish_weight_update", {"weight_version": weight_version})
        self.client.control("/resume")
        stamped = self.client.weight_version()
        if stamped != weight_version:
            raise PublishError(f"Published weight version {weight_version!r}, but the server says {stamped!r}.")


class FileTransport(_ServerTransport):
    """Writes each chunk to the server's transfer directory, which must be the same directory on both hosts."""

    def begin(self) -> None:
        directory = self.client.transfer_dir
        if not directory or not os.access(directory, os.W_OK | os.X_OK):
            raise PublishError(
                f"The server takes weights from {directory!r}, which this host cannot write to. Start the server with "
                "`trl-qarl vllm-serve --transfer_dir DIR`, where DIR is a directory both hosts share."
            )
        # What killed trainers left. Another server may take weights from the same directory, and its trainer's files stay.
        remove_leftovers(directory, also=self.client.instance)
        super().begin()

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


def _num_bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for _, tensor in tensors)


def _layer_of(name: str) -> str:
    """What must be sent together: the name up to its first number, such as `"model.layers.3"`, else its module."""
    match = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)
    return match.group() if match else name.rpartition(".")[0] or name
