"""
The trainer's LoRA adapter in a vLLM engine (docs/vllm.md): [`PublishedAdapter`] fills vLLM's buffers and reads them
back, and [`serve_adapter`] has the worker add the adapter to each request.

vLLM wraps the layers that may have an adapter. It keeps A and B of `q_proj`, `k_proj` and `v_proj` side by side. The
adapter of a layer that a checkpoint fuses too, such as GLM's `gate_up_proj`, is split: each part has the same A.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import nn
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from ..wire.fingerprint import fingerprint
from ..wire.protocol import is_adapter_tensor


_ADAPTER_ID = 1
# vLLM looks up the adapter by its number and never reads the path.
_REQUEST = LoRARequest("policy", _ADAPTER_ID, "published by the trainer")


def on_bare_model(method):
    """Decorate a method to run while the layers of its object's `model` have their names without LoRA."""

    @wraps(method)
    def call(self, *args, **kwargs):
        replaced = []
        for name, wrapper in _wrapped_layers(self.model):
            path, _, leaf = name.rpartition(".")
            parent = self.model.get_submodule(path)
            if getattr(parent, leaf) is wrapper:
                setattr(parent, leaf, wrapper.base_layer)
                replaced.append((parent, leaf, wrapper))
        try:
            return method(self, *args, **kwargs)
        finally:
            for parent, leaf, wrapper in replaced:
                setattr(parent, leaf, wrapper)

    return call


def describe_lora(model: nn.Module, lora_config: Any) -> dict[str, Any] | None:
    """Return the largest rank, dtype and layers of adapters that an engine can serve; `None` without LoRA."""
    if lora_config is None:
        return None
    manager = model.lora_manager
    names = [part for name in manager.modules for part in (name, *manager.packed_modules.get(name, ()))]
    return {
        "max_rank": lora_config.max_lora_rank,
        "dtype": str(lora_config.lora_dtype).removeprefix("torch."),
        "modules": sorted({name.rpartition(".")[2] for name in names}),
    }


class PublishedAdapter:
    """The adapter of the last publication in one worker. `engine_name` converts a name in a checkpoint to the engine's
    name. `is_whole` is true with `tensor_parallel_size=1`; the fingerprints of shards are unknown."""

    def __init__(self, model: nn.Module, engine_name: Callable[[str], str], is_whole: bool):
        self.model, self.engine_name, self.is_whole = model, engine_name, is_whole
        # A and B under the learner's names.
        self.tensors: dict[str, torch.Tensor] = {}
        self.arriving: dict[str, torch.Tensor] = {}
        self._live: list[str] = []

    def take(self, tensors: Iterable[tuple[str, torch.Tensor]], arrived: dict[str, str]) -> Iterator[tuple[str, Any]]:
        """Keep A and B of `tensors`, with their fingerprints in `arrived`, and yield the other tensors."""
        for name, tensor in tensors:
            if is_adapter_tensor(name):
                # Copy: the memory belongs to the transport or to the learner.
                self.arriving[name] = tensor.detach().clone()
                arrived[name] = fingerprint(self.arriving[name])
            else:
                yield name, tensor

    def accept(self, names: Iterable[str]) -> None:
        """Make the received tensors, which are complete and correct, the adapter; `names` has all its tensors."""
        known = self.tensors | self.arriving
        self.tensors = {name: known[name] for name in names}

    def changed(self) -> list[str]:
        """Return the names of A and B if the buffers have changed since the activation."""
        return sorted(self.tensors) if self._live != self._fingerprints() else []

    def activate(self) -> None:
        """Put the adapter into the engine's buffers, or raise `RuntimeError` if they then hold anything else."""
        manager = getattr(self.model, "lora_manager", None)
        if manager is None:
            if self.tensors:
                raise RuntimeError(
                    "An adapter was published to an engine without LoRA. Start the engine with `--max_lora_rank`."
                )
            return
        manager.remove_adapter(_ADAPTER_ID)
        self._live = []
        if not self.tensors:
            return
        rank = max(min(tensor.shape) for tensor in self.tensors.values())
        if rank > manager.lora_config.max_lora_rank:
            raise RuntimeError(
                f"An adapter of rank {rank} was published, and the engine has max_lora_rank={manager.lora_config.max_lora_rank}. "
                f"Start it with at least {rank}."
            )
        # B was multiplied by the scaling before it was sent.
        helper = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])
        tensors = dict(
            _unpacked(manager, {self.engine_name(n): self._as_loaded(n, t) for n, t in self.tensors.items()})
        )
        lora = LoRAModel.from_lora_tensors(
            _ADAPTER_ID, tensors, helper, device=str(manager.device), dtype=manager.lora_config.lora_dtype
        )
        manager.add_adapter(lora)
        manager.activate_adapter(_ADAPTER_ID)
        if self.is_whole and (problems := self._problems(manager.lora_index_to_id.index(_ADAPTER_ID))):
            raise RuntimeError("The published adapter is not the learner's:\n" + "\n".join(problems[:5]))
        self._live = self._fingerprints()

    def _as_loaded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        # Llama 4's loader reorders the rows of queries and keys, and with them those of B.
        reorder = getattr(self.model, "permute_qk_weight_for_rotary", None)
        return tensor if reorder is None or name.endswith("lora_A.weight") else reorder(name, tensor)[1]

    def _fingerprints(self) -> list[str]:
        layers = [layer for _, layer in _wrapped_layers(self.model)] if self.tensors else []
        return [fingerprint(buffer) for layer in layers for buffer in (*layer.lora_a_stacked, *layer.lora_b_stacked)]

    def _problems(self, slot: int) -> list[str]:
        """Describe the differences between the engine's buffers and the learner's adapter."""
        sent = {self.engine_name(name): (name, self._as_loaded(name, t)) for name, t in self.tensors.items()}
        packed = self.model.lora_manager.packed_modules
        problems = []
        for path, layer in _wrapped_layers(self.model):
            parts = [path] if f"{path}.lora_B.weight" in sent else packed.get(path) or [path]
            for part, first, last in _slices(layer, parts, sent):
                buffers = {
                    "lora_A": [stacked[slot, 0] for stacked in layer.lora_a_stacked[first:last]],
                    "lora_B": [torch.cat([stacked[slot, 0] for stacked in layer.lora_b_stacked[first:last]])],
                }
                for kind, held in buffers.items():
                    name, tensor = sent.pop(f"{part}.{kind}.weight", (part, held[0][:0, :0]))
                    problems += chain.from_iterable(_differences(name, tensor, each) for each in held)
        return problems + [f"{name}: the engine has no adapter there" for name, _ in sent.values()]


def _unpacked(manager: Any, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield A and B, those of a layer that vLLM has as several under the names of its parts."""
    for name, tensor in tensors.items():
        path, kind, _ = name.rsplit(".", 2)
        parts = manager.packed_modules.get(path) or [path]
        of_parts = [tensor] * len(parts)
        if kind == "lora_B" and len(parts) > 1:
            of_parts = tensor.split(manager.modules[path].output_sizes)
        yield from zip((f"{part}.{kind}.weight" for part in parts), of_parts, strict=True)


def _slices(
    layer: nn.Module, parts: list[str], sent: Mapping[str, tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, int, int]]:
    """Yield the matrices of a checkpoint that a layer fuses, with the first of their slices and the one after the
    last: the three projections of `in_proj_qkv` of a linear attention are slices of their own, with one A."""
    first, sizes = 0, [stacked.shape[2] for stacked in layer.lora_b_stacked]
    for part in parts:
        if f"{part}.lora_B.weight" in sent:
            rows = len(sent[f"{part}.lora_B.weight"][1])
            last = next((i for i in range(first + 1, len(sizes)) if sum(sizes[first:i]) >= rows), len(sizes))
        else:
            last = first + 1 if len(parts) == len(sizes) else len(sizes)
        yield part, first, last
        first = last


def _differences(name: str, tensor: torch.Tensor, held: torch.Tensor) -> Iterator[str]:
    """Yield how a buffer differs from the matrix that was sent, and padding."""
    rows, columns = tensor.shape
    inside = held[:rows, :columns]
    if tensor.numel() and (ours := fingerprint(tensor)) != (theirs := fingerprint(inside)):
        yield f"{name}: learner {ours}, engine's buffer {theirs}"
    if held.count_nonzero() != inside.count_nonzero():
        yield f"{name}: the engine's buffer holds more than was sent"


def serve_adapter(model_runner: Any, adapter: PublishedAdapter) -> Callable[[], None]:
    """Have a worker apply `adapter` to every request, if its engine has LoRA, and return vLLM's function that drops
    all adapters after base weights were replaced. vLLM no longer calls it at the end of a weight update, where the
    adapter is in place already. Calling this again changes nothing."""
    if model_runner.lora_config is None:
        return model_runner.reset_lora_state
    if hasattr(model_runner, "_qarl_reset_lora_state"):
        return model_runner._qarl_reset_lora_state
    execute_model = model_runner.execute_model
    model_runner._qarl_reset_lora_state = model_runner.reset_lora_state

    def execute_with_adapter(scheduler_output, *args, **kwargs):
        if adapter.tensors:
            for request in scheduler_output.scheduled_new_reqs:
                request.lora_request = _REQUEST
        return execute_model(scheduler_output, *args, **kwargs)

    model_runner.execute_model = execute_with_adapter
    model_runner.reset_lora_state = lambda: None
    return model_runner._qarl_reset_lora_state


def _wrapped_layers(model: nn.Module) -> list[tuple[str, Any]]:
    manager = getattr(model, "lora_manager", None)
    return [] if manager is None else list(manager.modules.items())
