"""Report of a preparation: quantized layers, their formats, and the layers left in high precision."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from .experts import QuantizedExperts
from .formats.registry import format_of
from .plan import QuantPlan
from .schemes import QuantScheme
from .weight import QuantizedLayer, QuantizedWeight


@dataclass(frozen=True)
class SwapReport:
    """
    Result of [`~trl_qarl.quantization.swap.prepare_model`]; mappings are by the names of layers.

    - `converted`: group size of each converted layer; `None` for one scale per output channel.
    - `skipped`: the reason why a linear layer, or module of experts, stays in high precision.
    - `master_bytes`, `bf16_bytes`, `low_bit_bytes`: size of the converted weights as masters, in 16 bits, and in low
      bits with their scales.
    - `dropped_bytes`: size of the masters that [`~trl_qarl.quantization.swap.freeze_model`] has dropped since.
    - `schemes`: scheme of each converted layer.
    - `num_experts`: number of experts in each converted module of experts.
    """

    plan: QuantPlan
    converted: dict[str, int | None] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    master_bytes: int = 0
    bf16_bytes: int = 0
    low_bit_bytes: int = 0
    dropped_bytes: int = 0
    schemes: dict[str, QuantScheme] = field(default_factory=dict)
    num_experts: dict[str, int] = field(default_factory=dict)

    @property
    def layers(self) -> str:
        """Number of quantized layers and experts, as text."""
        experts = f" and {sum(self.num_experts.values())} experts in {len(self.num_experts)} layers"
        return f"{len(self.converted) - len(self.num_experts)} linear layers{experts if self.num_experts else ''}"

    def __str__(self) -> str:
        if not self.plan.is_quantized:
            return f"scheme {self.plan.name}: every layer stays in high precision"
        # The beginning of the line names a single scheme.
        is_mixed = len({scheme.name for scheme in self.schemes.values()}) > 1
        groups = Counter(
            (f"{self.schemes[name].name} " if is_mixed else "")
            + ("per output channel" if size is None else f"group {size}")
            for name, size in self.converted.items()
        )
        parts = [f"{count} {group}" for group, count in groups.items()]
        low_bit, in_bf16 = (f"{size / 2**20:.1f} MiB" for size in (self.low_bit_bytes, self.bf16_bytes))
        about = f"scheme {self.plan.name}: {self.layers} quantized ({', '.join(parts)})"
        lines = [f"{about}, {low_bit} low-bit against {in_bf16} in bf16"]
        if self.dropped_bytes:
            lines.append(f"frozen: {self.dropped_bytes / 2**20:.1f} MiB of master weights dropped")
        for reason, count in Counter(self.skipped.values()).items():
            names = [name for name, why in self.skipped.items() if why == reason]
            lines.append(f"left alone: {count} ({reason}): {', '.join(names[:3])}{', ...' if count > 3 else ''}")
        smaller = {of.group_size or 0 for name, of in self.schemes.items() if self.converted[name] != of.group_size}
        for size in sorted(smaller):
            lines.append(f"group_size={size} does not divide every layer; the smaller sizes are above")
        return "\n".join(lines)


def report_layers(
    plan: QuantPlan, layers: Mapping[str, QuantizedLayer], skipped: Mapping[str, str], has_masters: bool
) -> SwapReport:
    """Return the report of quantized layers and of the reasons for `skipped` ones."""
    weights = [weight for layer in layers.values() for weight in layer.quantized_weights.values()]
    return SwapReport(
        plan=plan,
        converted={name: layer.group_size for name, layer in layers.items()},
        skipped=dict(skipped),
        master_bytes=sum(w.parameter.itemsize * w.shape.numel() for w in weights) if has_masters else 0,
        bf16_bytes=sum(2 * weight.shape.numel() for weight in weights),
        low_bit_bytes=sum(map(low_bit_bytes, weights)),
        schemes={name: layer.scheme for name, layer in layers.items()},
        num_experts={name: layer.num_experts for name, layer in layers.items() if isinstance(layer, QuantizedExperts)},
    )


def low_bit_bytes(weight: QuantizedWeight) -> int:
    """Return the size of a low-bit weight in bytes, without computing the weight."""
    *rows, columns = weight.shape
    num_rows = math.prod(rows)
    num_scales = columns // (weight.group_size or columns) * num_rows
    container, fixed = weight.scheme.container, weight.scheme.scale_dtype
    scale_dtype = weight.scale_dtype if fixed is None else getattr(torch, fixed)
    operands = format_of(container).operands
    of_operands = sum(o.dtype.itemsize * (num_scales if o.per_group else num_rows) for o in operands)
    return weight.shape.numel() * container.num_bits // 8 + num_scales * scale_dtype.itemsize + of_operands
