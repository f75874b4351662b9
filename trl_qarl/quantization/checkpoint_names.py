"""
Names that a model's tensors have in a checkpoint, where they differ from those in the model: in a mixture of experts.

transformers stacks matrices of experts that lie apart in a checkpoint, and renames what is around them (Mixtral's
`mlp` is `block_sparse_moe` there). It has one conversion for each model, which is asked here with marks in place of
tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from .experts import DOWN, GATE_UP, QuantizedExperts, problem_of_experts
from .names import base_state_dict
from .storage import shapes_of


__all__ = ["CheckpointNames", "find_checkpoint_names"]

_ROW_BLOCKS = {GATE_UP: 2, DOWN: 1}


@dataclass(frozen=True)
class CheckpointNames:
    """Names in a checkpoint: in `tensors`, of each tensor that is kept as it is, by its name in the model; in
    `experts`, of the matrices, without `".weight"`, whose rows a parameter of experts stacks, in their order."""

    tensors: dict[str, str] = field(default_factory=dict)
    experts: dict[str, list[str]] = field(default_factory=dict)

    def of_tensor(self, name: str) -> str:
        """Return the name of a tensor, or of a module with a tensor `weight`."""
        of_module = self.tensors.get(f"{name}.weight")
        return of_module.removesuffix(".weight") if of_module else self.tensors.get(name, name)


def find_checkpoint_names(
    model: nn.Module, modules: Mapping[str, nn.Module], is_mixture: bool = True
) -> CheckpointNames:
    """
    Return the names that `model`, with these `modules`, has in a checkpoint. There are none for a model without
    experts that can be quantized, or whose checkpoints do not have the experts' matrices one by one. With
    `is_mixture=False` there are names for any model: those that `save_pretrained` writes, as `visual.` for
    Qwen2.5-VL's `model.visual.`, where exports and engines take both.
    """
    stacked = {
        f"{name}.{leaf}": (module.num_experts, blocks)
        for name, module in modules.items()
        if isinstance(module, QuantizedExperts) or problem_of_experts(module) is None
        for leaf, blocks in _ROW_BLOCKS.items()
    }
    if (is_mixture and not stacked) or not isinstance(model, PreTrainedModel):
        return CheckpointNames()
    found = CheckpointNames()
    shapes = {f"{name}.{leaf}": shape for name, m in modules.items() for leaf, shape in shapes_of(m).items()}
    for name, tensor in base_state_dict(model).items():
        if name in stacked:
            num_experts, blocks = stacked[name]
            # One row stands for all rows of a matrix, its number for its place among them.
            mark = torch.arange(num_experts * blocks).view(num_experts, blocks, 1)
        else:
            mark = torch.empty(shapes.get(name, tensor.shape), device="meta")
        reverted = revert_weight_conversion(model, {name: mark})
        if len(reverted) != (mark.numel() if name in stacked else 1):
            return CheckpointNames()
        if name in stacked:
            places = {int(matrix): of.removesuffix(".weight") for of, matrix in reverted.items()}
            found.experts[name] = [places[place] for place in sorted(places)]
        else:
            [found.tensors[name]] = reverted
    return found
