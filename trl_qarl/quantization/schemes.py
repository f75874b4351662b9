"""
Quantization schemes: one frozen description per scheme, read by every other part of the package.

A scheme says how a weight becomes low-bit (number format, granularity, scale rule), what happens to the activations that
meet it, and how compressed-tensors names the result. The arithmetic itself is in [`~trl_qarl.quantization.quantize`]; nothing here
imports torch, so the command line can list schemes at once.

| name | weight | granularity | activations | checkpoint format |
|---|---|---|---|---|
| `w4a16` | INT4 symmetric | groups of 128, 64 or 32 along the input | none | `pack-quantized` |
| `w8a16` | INT8 symmetric | output channel | none | `pack-quantized` |
| `w8a8` | INT8 symmetric | output channel | INT8, per token, dynamic | `int-quantized` |
| `fp8` | FP8 E4M3 | output channel | FP8 E4M3, per token, dynamic | `float-quantized` |
| `w4a8` | INT4 symmetric | groups of 128 along the input | FP8 E4M3, per token, dynamic | `pack-quantized` |
| `bf16` | as in the model | - | none | ordinary checkpoint |
"""

from dataclasses import dataclass, replace
from typing import Any, Literal


__all__ = ["GROUP_SIZES", "SCHEMES", "QuantScheme", "get_scheme"]

GROUP_SIZES = (128, 64, 32)
"""Group sizes that both the CPU and the CUDA INT4 kernels with 16-bit activations accept, largest first."""


@dataclass(frozen=True)
class QuantScheme:
    """
    One quantization scheme.

    Args:
        name (`str`):
            Name of the scheme, as passed to [`QaRLConfig`].
        weight_type (`str` or `None`):
            `"int"`, `"float"`, or `None` when weights stay in high precision.
        num_bits (`int`):
            Bits per weight.
        group_size (`int` or `None`):
            Consecutive input features that share a scale; `None` for one scale per output channel.
        activation_type (`str` or `None`):
            `"int"` or `"float"` for dynamic per-token 8-bit activations, `None` to leave activations alone.
        scale_dtype (`str` or `None`):
            Dtype of the weight scales; `None` for the dtype in which the engine runs the model.
        format (`str`):
            compressed-tensors' name of the checkpoint format.
    """

    name: str
    weight_type: Literal["int", "float"] | None
    num_bits: int
    group_size: int | None
    activation_type: Literal["int", "float"] | None
    scale_dtype: str | None
    format: str

    @property
    def is_quantized(self) -> bool:
        """Whether the scheme changes any weight."""
        return self.weight_type is not None

    @property
    def quant_range(self) -> tuple[float, float]:
        """Smallest and largest representable code."""
        if self.weight_type == "float":
            return -448.0, 448.0
        return float(-(2 ** (self.num_bits - 1))), float(2 ** (self.num_bits - 1) - 1)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Group sizes that the engine's kernels accept, largest first; empty for one scale per output channel."""
        if self.group_size is None:
            return ()
        # CUTLASS' product of INT4 and FP8 has this one.
        return GROUP_SIZES if self.activation_type is None else (128,)

    @property
    def has_fp8_scales(self) -> bool:
        """Whether the engine turns the scales of groups into FP8: INT4 weights that meet FP8 activations."""
        return self.group_size is not None and self.activation_type == "float"

    @property
    def scale_divisor(self) -> float:
        """
        `amax / scale`: half the code range, as compressed-tensors has it: 7.5 for INT4, 127.5 for INT8, 448 for E4M3.
        """
        qmin, qmax = self.quant_range
        return (qmax - qmin) / 2

    def group_size_for(self, in_features: int) -> int | None:
        """
        Group size used for a matrix with `in_features` input features.

        It is `group_size` where that divides `in_features`, else the next smaller size of `group_sizes` that does.

        Raises:
            ValueError: if no group size divides `in_features`, or if the checkpoint packs codes into words that
                `in_features` codes do not fill.
        """
        if self.group_size is None:
            codes_per_word = 32 // self.num_bits
            if self.format == "pack-quantized" and in_features % codes_per_word:
                raise ValueError(
                    f"in_features={in_features} is not divisible by {codes_per_word}, the number of codes that the "
                    f"checkpoint of scheme {self.name!r} packs into a word. Leave the layer out with `exclude_modules`, "
                    "or use a scheme that does not pack codes (`w8a8`, `fp8`)."
                )
            return None
        allowed = [size for size in self.group_sizes if size <= self.group_size]
        for size in allowed:
            if in_features % size == 0:
                return size
        raise ValueError(
            f"in_features={in_features} is not divisible by any group size of {allowed}, so scheme {self.name!r} with "
            f"group_size={self.group_size} cannot quantize it. Leave the layer out with `exclude_modules`, or use a "
            "scheme with one scale per output channel (`w8a8`, `w8a16`, `fp8`)."
        )

    def weight_args(self, group_size: int | None) -> dict[str, Any]:
        """Arguments of compressed-tensors' `QuantizationArgs` for a weight quantized with `group_size`."""
        strategy = {"strategy": "channel"} if group_size is None else {"strategy": "group", "group_size": group_size}
        return {"num_bits": self.num_bits, "type": self.weight_type, "symmetric": True, "dynamic": False, **strategy}

    @property
    def activation_args(self) -> dict[str, Any] | None:
        """Arguments of compressed-tensors' `QuantizationArgs` for the activations, or `None`."""
        if self.activation_type is None:
            return None
        return {"num_bits": 8, "type": self.activation_type, "symmetric": True, "strategy": "token", "dynamic": True}


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        QuantScheme("w4a16", "int", 4, 128, None, None, "pack-quantized"),
        QuantScheme("w8a16", "int", 8, None, None, None, "pack-quantized"),
        QuantScheme("w8a8", "int", 8, None, "int", "float32", "int-quantized"),
        QuantScheme("fp8", "float", 8, None, "float", "float32", "float-quantized"),
        QuantScheme("w4a8", "int", 4, 128, "float", "bfloat16", "pack-quantized"),
        QuantScheme("bf16", None, 16, None, None, None, "dense"),
    )
}


def get_scheme(scheme: str | QuantScheme, group_size: int | None = None) -> QuantScheme:
    """
    Look a scheme up by name.

    Args:
        scheme (`str` or [`QuantScheme`]):
            Name of the scheme; a [`QuantScheme`] is returned as it is when `group_size` is `None`.
        group_size (`int`, *optional*):
            Group size instead of the scheme's own; only for schemes with groups.

    Raises:
        ValueError: for an unknown name, a group size that no kernel accepts, or a group size on a scheme without groups.
    """
    if isinstance(scheme, str):
        if scheme not in SCHEMES:
            raise ValueError(f"Unknown scheme {scheme!r}. Choose one of {sorted(SCHEMES)}.")
        scheme = SCHEMES[scheme]
    if group_size is None:
        return scheme
    if scheme.group_size is None:
        raise ValueError(
            f"group_size={group_size} was given, but scheme {scheme.name!r} has no groups. Remove `group_size`, or use "
            "scheme 'w4a16'."
        )
    if group_size not in scheme.group_sizes:
        raise ValueError(
            f"group_size={group_size} is not supported: the kernels of scheme {scheme.name!r} take "
            f"{sorted(scheme.group_sizes)}. Choose one of them."
        )
    return replace(scheme, group_size=group_size)
