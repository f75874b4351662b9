"""
Publication: after an optimizer step, gives the engine exactly the low-bit tensors with which the learner computes.

[`Publisher`] walks through the model layer by layer, takes the fingerprint of every tensor, skips unchanged decoder
layers, and sends the rest in chunks of bounded size. The engine then compares its tensors with *all* fingerprints
([`trl_qarl.vllm_plugin.weight_transfer`]) and refuses to generate if any tensor differs.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain, groupby
from typing import Any

import torch
from torch import nn

from .._version import __version__
from ..adapters.tensors import adapter_problems, iter_adapter_tensors
from ..checkpoint.layout import check_finite, iter_checkpoint_layers, quantization_config
from ..engines.background import BackgroundCall
from ..engines.engine import Engine, Tensors, num_bytes_of
from ..engines.gpu_kernels import Gpu, reason_against, unexpected_kernels
from ..engines.pictures import takes_pictures
from ..quantization.experts import QuantizedExperts
from ..quantization.inventory import Inventory, rotary_embeddings
from ..quantization.names import layer_of
from ..quantization.storage import is_sharded
from ..wire.describe import (
    PICTURE_OPTIONS,
    config_differences,
    describe_model,
    describe_pictures,
    describe_tokenizer,
    differences,
    rotation_differences,
    window_differences,
)
from ..wire.fingerprint import fingerprints as fingerprints_of
from ..wire.protocol import is_adapter_tensor, load_order
from .canary import Canary


CHUNK_BYTES = 128 * 2**20
"""Size at which a chunk is sent; larger only if a single decoder layer is. Two chunks can exist at once, one being
sent and the next one."""

# Layers whose inputs vLLM divides among ranks, by their last names.
_SPLIT_BY_INPUTS = ("o_proj", "out_proj", "down_proj", "w2", "fc2", "c_proj")

logger = logging.getLogger(__name__)


class Publisher:
    """
    Publishes one model to one engine.

    `model` is a learner, prepared by [`prepare_model`] or unquantized; tensors that are not quantized are rounded to
    the engine's `dtype`. A process that only takes part in gathering ([`~Publisher.join`]) has no `engine`. A
    `tokenizer` or processor is compared with the engine's, and log-probs after each publication.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, engine: Engine | None, tokenizer=None):
        self.model = model
        self.dtype = dtype
        self.engine = engine
        self.processing_class = tokenizer
        self.tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        self.canary = Canary(model, dtype, tokenizer)
        self._published: dict[str, str] = {}

    def forget(self) -> None:
        """Make the next publication send everything, because the engine is new or its state is unknown."""
        self._published = {}

    def check_engine(self) -> dict[str, Any]:
        """Return the engine's description. `ValueError` is raised if the engine does not fit this learner, with both
        values of every setting that differs."""
        theirs = self.engine.describe()
        if theirs.get("trl_qarl") != __version__:
            raise ValueError(
                f"The engine runs trl_qarl {theirs.get('trl_qarl')}, and this trainer {__version__}: kernels, names and messages may differ. "
                "Install the same version on both sides, and start the server again."
            )
        inventory = Inventory.of(self.model)
        quantization = quantization_config(inventory)
        problems = config_differences(quantization, theirs["quantization_config"])
        ours = {"dtype": str(self.dtype).removeprefix("torch."), "logprobs_mode": "processed_logprobs"}
        problems += differences("", ours, theirs, ours)
        config = getattr(self.model, "config", None)
        if config is not None:
            ours = describe_model(config.get_text_config())
            problems += differences("model.", ours, theirs.get("model") or {})
            embeddings = rotary_embeddings(inventory.modules.values())
            rotations = [(factor, angles[angles != 0].tolist()) for factor, angles in embeddings]
            problems += rotation_differences(rotations, theirs.get("rotations") or [])
            context = theirs.get("max_model_len", math.inf)
            problems += window_differences(config.get_text_config(), theirs.get("windows") or [], context)
            image_processor = getattr(self.processing_class, "image_processor", None)
            # Pictures of other classes are refused, and vLLM gives their processors settings of its own.
            shown = image_processor if takes_pictures(self.model) else None
            ours = describe_pictures(config, shown, PICTURE_OPTIONS)
            engine = {**(theirs.get("pictures") or {})}
            # vLLM's own classes of configurations lack settings.
            towers = [side.pop("tower", {}) for side in (ours, engine)]
            problems += differences("pictures.", ours, engine) + differences("pictures.tower.", *towers)
        if self.tokenizer is not None:
            ours = describe_tokenizer(self.tokenizer)
            problems += differences("tokenizer.", ours, theirs.get("tokenizer") or {})
        problems += [
            *_unsupported_settings(theirs),
            *adapter_problems(self.model, theirs),
            *_kernel_problems(inventory, theirs),
            *problems_of_ranks(inventory, quantization, theirs["tensor_parallel_size"]),
        ]
        needed = max((len(text.token_ids) + 1 for text in self.canary.texts), default=0)
        if theirs.get("max_model_len", needed) < needed:
            problems.append(
                f"max_model_len: {needed} at least, because fixed texts are scored after each publication, the engine has {theirs['max_model_len']}"
            )
        if problems:
            listed = "\n  ".join(problems)
            raise ValueError(
                f"The engine was not started for this learner:\n  {listed}\nStart a server with `trl-qarl vllm-serve` and the same "
                "model, tokenizer, scheme, group_size, exclude_modules and dtype. If the model or the tokenizer was changed after it was "
                "loaded, save both to a folder with `save_pretrained` and give it as `--model`, or have the trainer start the "
                "engine: vllm_mode='colocate' or vllm_server_autostart=True."
            )
        return theirs

    def publish(self, weight_version: str) -> dict[str, float]:
        """
        Send the changes since the last publication, check all tensors, and return measurements. With sharded masters
        the other processes [`~Publisher.join`].

        Returns:
            `publish/seconds`; `publish/audit_seconds`, the part that the learner spent on fingerprints;
            `publish/megabytes` sent; `publish/tensors` sent; `publish/unchanged_tensors` not sent again; with a
            tokenizer the results of [`Canary`].

        Raises:
            PublishError: if the engine does not hold the weights. The next call sends everything.
        """
        start, self._audit_seconds = time.perf_counter(), 0.0
        fingerprints: dict[str, str] = {}
        # First: it gathers, and the other ranks must not wait for this one if anything else fails.
        learner = self.canary.score()
        layers = self._layers()
        try:
            num_bytes, num_tensors = self._send(layers, fingerprints, weight_version)
        finally:
            # Finish the collectives even after a failure: the other ranks do not know about it.
            for _ in layers if is_sharded(self.model) else ():
                pass
        canary = self.canary.compare(learner, self.engine)
        self._published = fingerprints
        return {
            "publish/seconds": time.perf_counter() - start,
            "publish/audit_seconds": self._audit_seconds,
            "publish/megabytes": num_bytes / 2**20,
            "publish/tensors": num_tensors,
            "publish/unchanged_tensors": len(fingerprints) - num_tensors,
            **canary,
        }

    def join(self) -> None:
        """Join the collectives of another process' publication."""
        self.canary.score()
        for _ in self._layers():
            pass

    def _layers(self) -> Iterator[Tensors]:
        """Yield the tensors to publish layer by layer, at last those of an adapter. Sharded ones reach the main
        process alone unless each process has an engine."""
        to_main = self.engine is None or not self.engine.in_every_process
        yield from iter_checkpoint_layers(self.model, self.dtype, stacks_experts=True, to_main=to_main)
        yield list(iter_adapter_tensors(self.model, self.dtype, to_main))

    def _send(self, layers: Iterator[Tensors], fingerprints: dict[str, str], weight_version: str) -> tuple[int, int]:
        """Send the layers that have changed, add all fingerprints to `fingerprints`, and return the numbers of bytes
        and tensors sent."""
        num_bytes = num_tensors = 0
        published, self._published = self._published, {}
        layers = self._with_fingerprints(layers)
        with _calls_of(self.engine) as call:
            # The engine checks its tensors, and later loads a chunk, while the next chunk is quantized here.
            call.start(self.engine.begin)
            first = _take_while_running(call, layers)
            lost = call.answer() or []
            self._send_again(lost, published)
            chunk: Tensors = []
            for layer, current in chain((first.popleft() for _ in range(len(first))), layers):
                fingerprints.update(current)
                # Engines fuse matrices of a layer, so a layer is sent as a whole or not at all.
                if all(published.get(name) == value for name, value in current.items()):
                    continue
                num_tensors += len(layer)
                if chunk and num_bytes_of(chunk) + num_bytes_of(layer) > CHUNK_BYTES:
                    call.answer()
                    call.start(partial(self.engine.send, chunk))
                    chunk = []
                chunk += layer
                num_bytes += num_bytes_of(layer)
            call.answer()
            if chunk:
                self.engine.send(chunk)
        self.engine.finish(fingerprints, weight_version)
        return num_bytes, num_tensors

    def _send_again(self, lost: list[str], published: dict[str, str]) -> None:
        """Remove the tensors that the engine has `lost` from `published`."""
        changed = [name for name in lost if published.pop(name, None) is not None]
        if changed:
            logger.warning(
                "The engine no longer held the published weights: something else writes into its memory. Sent again: %s",
                # What is sent together.
                ", ".join(sorted({"adapter" if is_adapter_tensor(name) else layer_of(name) for name in changed})),
            )
            # The cache may hold NaN from corrupt weights. Attention reads whole blocks of it, and 0 times NaN is NaN.
            self.engine.clear_cache()

    def _with_fingerprints(self, layers: Iterator[Tensors]) -> Iterator[tuple[Tensors, dict[str, str]]]:
        for layer in layers:
            layer.sort(key=lambda item: load_order(item[0]))
            start = time.perf_counter()
            check_finite(layer)
            current = fingerprints_of(layer)
            self._audit_seconds += time.perf_counter() - start
            yield layer, current


@contextmanager
def _calls_of(engine: Engine) -> Iterator[BackgroundCall]:
    """Make one call of an engine at a time. After an exception no call is left running, for the next attempt."""
    call, num_threads = BackgroundCall(in_thread=engine.works_meanwhile), torch.get_num_threads()
    if engine.works_meanwhile:
        # Leave cores to the engine: more threads than cores busy-wait, and quantizing takes several times as long.
        torch.set_num_threads(max(1, num_threads // 2))
    try:
        yield call
    except Exception:
        call.wait()
        raise
    finally:
        if engine.works_meanwhile:
            torch.set_num_threads(num_threads)


def _take_while_running(call: BackgroundCall, layers: Iterator[tuple[Tensors, dict[str, str]]]) -> deque:
    """Return the layers that are ready before the `call` ends, up to the size of a chunk."""
    taken, num_bytes = deque(), 0
    while call.is_running and num_bytes < CHUNK_BYTES and (layer := next(layers, None)) is not None:
        taken.append(layer)
        num_bytes += num_bytes_of(layer[0])
    return taken


def check_ranks(model: nn.Module, config: Mapping[str, Any] | None, size: int) -> None:
    """Raise `ValueError` for [`problems_of_ranks`] of a model, before its engine is started."""
    if problems := [*problems_of_ranks(Inventory.of(model), config or {}, size)]:
        raise ValueError("\n".join(f"{problem}." for problem in problems))


def problems_of_ranks(inventory: Inventory, config: Mapping[str, Any], size: int) -> Iterator[str]:
    """Yield reasons why an engine of `size` tensor-parallel ranks, with the `quantization_config` of an inventory,
    cannot compute what the learner does."""
    if size == 1:
        return
    if any(group.get("input_activations") for group in config.get("config_groups", {}).values()):
        yield (
            f"tensor_parallel_size={size} with 8-bit activations: each rank would round its part of the inputs of `o_proj` and `down_proj` "
            "with a scale of its own, and the learner rounds whole rows. Use replicas (`--data-parallel-size`), or a scheme with "
            "16-bit activations such as 'w4a16' or 'w8a16'"
        )
    seen = set()
    for name, layer in inventory.layers.items():
        for leaf, weight in layer.quantized_weights.items():
            last = leaf if isinstance(layer, QuantizedExperts) else name.rpartition(".")[2]
            inputs, group_size = weight.shape[-1], weight.group_size
            is_split = last in _SPLIT_BY_INPUTS and group_size and inputs % (size * group_size)
            if not is_split or (inputs, group_size) in seen:
                continue
            seen.add((inputs, group_size))
            sizes = [ranks for ranks in range(1, inputs // group_size + 1) if inputs % (ranks * group_size) == 0]
            groups = [smaller for smaller in weight.scheme.group_sizes if inputs % (size * smaller) == 0]
            yield (
                f"tensor_parallel_size={size} splits groups of {group_size}: {name} has {inputs} inputs. Use tensor_parallel_size "
                f"{' or '.join(map(str, sizes))}"
                + (f", or group_size {' or '.join(map(str, groups))}" if groups else "")
            )


def largest_chunk(model: nn.Module, dtype: torch.dtype) -> int:
    """Return an upper bound of the bytes of a chunk when `model`, which may be on the meta device, is published."""
    layers = groupby(model.state_dict().items(), key=lambda item: layer_of(item[0]))
    sizes = [
        sum(t.numel() * (dtype if t.is_floating_point() else t.dtype).itemsize for _, t in layer)
        for _, layer in layers
    ]
    return min(sum(sizes), max(CHUNK_BYTES, *sizes))


def _unsupported_settings(engine: Mapping[str, Any]) -> Iterator[str]:
    """Yield settings of an engine with which it would not sample from the published weights."""
    for name, models in (("pipeline_parallel_size", ""), ("data_parallel_size", " for a mixture of experts")):
        if engine.get(name, 1) != 1:
            yield f"{name}: 1 is supported{models}, the engine has {engine[name]}: the audit sees whole models only"
    if engine.get("enable_expert_parallel"):
        yield "enable_expert_parallel: not supported, as a rank holds some experts, and the audit sees whole models only"
    if engine.get("kv_cache_dtype", "auto") not in ("auto", engine["dtype"]):
        yield (
            f"kv_cache_dtype: the learner keeps keys and values in {engine['dtype']!r}, the engine in {engine['kv_cache_dtype']!r}"
        )
    if engine.get("is_speculative"):
        yield "speculative_config: not supported, as no weights are published to a draft model"
    if engine.get("use_w4a8"):
        yield (
            "activations: the learner does not quantize them, but the engine's INT4 kernel rounds them to 8 bits, vLLM's default on CPUs "
            "with AMX. Set VLLM_CPU_INT4_W4A8=0 in its environment"
        )


def _kernel_problems(inventory: Inventory, engine: Mapping[str, Any]) -> Iterator[str]:
    kernels = engine.get("kernels") or ()
    if engine.get("gpu") is None:
        # vLLM's other CPU kernels compute the scheme, except those that round activations to 4 bits.
        yield from (
            f"kernels: {kernel} may quantize activations. Start the engine with this package (`trl-qarl vllm-serve`)"
            for kernel in kernels
            if "fp4" in kernel.lower() and not kernel.startswith("QaRL")
        )
        return
    gpu = Gpu(**engine["gpu"])
    layers = inventory.layers.values()
    experts = [layer.scheme for layer in layers if isinstance(layer, QuantizedExperts)]
    linear = [layer.scheme for layer in layers if not isinstance(layer, QuantizedExperts)]
    refused = [reason for scheme in dict.fromkeys(linear + experts) if (reason := reason_against(scheme, gpu))]
    yield from refused or unexpected_kernels(kernels, linear, experts, gpu)
