"""
Reads checkpoints of GPTQ's own layout (`quant_method: gptq`, of AutoGPTQ and GPTQModel) as compressed-tensors'.

For a matrix `(N, K)` the file has `qweight`, int32 `(K * bits / 32, N)`, words of unsigned codes along the input
features; `scales` `(K / group_size, N)`; `qzeros`, the zero points in words, less 1 in `checkpoint_format: gptq`; and
`g_idx`, the group of each input feature. With the zero point in the middle, in feature order, `qweight` and `scales`
are the transposes of `weight_packed` and `weight_scale`.
"""

from collections.abc import Mapping
from typing import Any

import torch


LEAVES = ("qweight", "qzeros", "scales", "g_idx")


def config_groups(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of such a checkpoint as compressed-tensors' groups."""
    size = config["group_size"]
    weights = {"num_bits": config["bits"], "type": "int", "symmetric": config.get("sym", True), "dynamic": False}
    weights |= {"strategy": "channel"} if size == -1 else {"strategy": "group", "group_size": size}
    # Groups that are fixed before the columns are ordered keep their places, as does one group.
    if config.get("desc_act") and size != -1 and not config.get("static_groups"):
        weights["actorder"] = "group"
    return {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}


def as_compressed_tensors(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the `tensors` of a checkpoint under compressed-tensors' names. `ValueError` is raised for zero points off
    the middle, and for reordered input features."""
    bits = config["bits"]
    converted = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in LEAVES}
    for name in tensors:
        layer, _, leaf = name.rpartition(".")
        if leaf != "qweight":
            continue
        qweight, qzeros, scales, g_idx = (tensors.get(f"{layer}.{leaf}") for leaf in LEAVES)
        num_columns = len(qweight) * 32 // bits
        middle = 2 ** (bits - 1) - (config.get("checkpoint_format", "gptq") == "gptq")
        words = qzeros.contiguous().view(torch.uint8)
        if (words != (middle * 0x11 if bits == 4 else middle)).any():
            raise ValueError(
                f"{name!r} has zero points off the middle of its codes, which are unsupported. Start from the high-precision checkpoint, or "
                "quantize it again with `sym=True`."
            )
        groups = torch.arange(num_columns) // (num_columns // len(scales))
        if g_idx is not None and not torch.equal(g_idx.long().cpu(), groups):
            raise ValueError(
                f"{layer}.g_idx orders the columns anew (act-order), which no kernel here supports. Quantize again with `desc_act=False`."
            )
        converted[f"{layer}.weight_packed"] = qweight.t().contiguous()
        # A view of one row would keep the strides of columns.
        converted[f"{layer}.weight_scale"] = scales.t().clone(memory_format=torch.contiguous_format)
    return converted
