"""
Quantization schemes: one frozen description per scheme, read by every other part of the package.

A scheme names the *grid* of the weight's codes, the *container* in which codes are stored, sent and multiplied, the
number of input features that share a scale, and the grid of the activations. Engine, checkpoint and kernels see only
the container, so a policy of 3 bits runs wherever INT4 does. This module does not import torch, so the command line
lists schemes at once; the arithmetic is in [`trl_qarl.quantization.formats`].
"""

from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal


GROUP_SIZES = (128, 64, 32)
"""Group sizes that both the CPU and the CUDA INT4 kernels with 16-bit activations accept, largest first."""


@dataclass(frozen=True)
class Grid:
    """
    Codes to which numbers are rounded, and the rule that gives the scale of the numbers that share it.

    By default the largest magnitude is half the range of codes. With `has_signed_scales` the number of largest
    magnitude, with its sign, is the smallest code.
    """

    name: str
    type: Literal["int", "float"]
    num_bits: int
    has_signed_scales: bool = False

    @property
    def quant_range(self) -> tuple[float, float]:
        """Smallest and largest code."""
        if self.type == "float":
            return (-6.0, 6.0) if self.num_bits == 4 else (-448.0, 448.0)
        return float(-(2 ** (self.num_bits - 1))), float(2 ** (self.num_bits - 1) - 1)

    @property
    def scale_divisor(self) -> float:
        """Divisor that turns the largest number into the scale: half the code range, as in compressed-tensors, or the
        smallest code with signed scales."""
        qmin, qmax = self.quant_range
        return qmin if self.has_signed_scales else (qmax - qmin) / 2


INT4, INT8 = (Grid(f"int{bits}", "int", bits) for bits in (4, 8))
INT2_SIGNED, INT3_SIGNED, INT4_SIGNED = (Grid(f"int{bits}-signed", "int", bits, True) for bits in (2, 3, 4))
E2M1, E4M3 = Grid("e2m1", "float", 4), Grid("e4m3", "float", 8)


@dataclass(frozen=True)
class Container:
    """
    Storage, transport and multiplication of codes; [`trl_qarl.quantization.formats`] has the operations.

    - `type`: type of the codes; `None` if weights stay as they are.
    - `checkpoint_format`: compressed-tensors' name of the container.
    - `word_size`: codes in a word of the checkpoint. Rows fill whole words.
    - `group_sizes`: sizes that its kernels accept, largest first; empty for one scale per output channel.
    - `has_global_scale`: true if one number divides all scales of a matrix of the engine.
    - `scale_dtype`: dtype of the scales; `None` if it depends on the scheme.
    """

    name: str
    type: Literal["int", "float"] | None
    num_bits: int
    checkpoint_format: str
    word_size: int = 1
    group_sizes: tuple[int, ...] = ()
    has_global_scale: bool = False
    scale_dtype: str | None = None


INT4_PACKED = Container("int4-packed", "int", 4, "pack-quantized", 8, GROUP_SIZES)
INT8_PACKED = Container("int8-packed", "int", 8, "pack-quantized", 4)
INT8_CODES = Container("int8", "int", 8, "int-quantized")
MXFP4 = Container("mxfp4", "float", 4, "mxfp4-pack-quantized", group_sizes=(32,), scale_dtype="uint8")
NVFP4 = Container(
    "nvfp4", "float", 4, "nvfp4-pack-quantized", 1, (16,), has_global_scale=True, scale_dtype="float8_e4m3fn"
)
E4M3_CODES = Container("e4m3", "float", 8, "float-quantized")
DENSE = Container("dense", None, 16, "dense")


@dataclass(frozen=True)
class QuantScheme:
    """
    One quantization scheme. `ValueError` is raised if no kernel multiplies the container with such groups.

    - `name`: value of `scheme` in [`QaRLConfig`].
    - `grid`: codes of the weights; `None` if weights stay in high precision.
    - `group_size`: input features that share a scale; `None` for one scale per output channel.
    - `activation`: codes of dynamic per-token activations; `None` for activations in 16 bits.
    """

    name: str
    grid: Grid | None
    container: Container
    group_size: int | None = None
    activation: Grid | None = None

    def __post_init__(self) -> None:
        if self.group_size not in (self.group_sizes or (None,)):
            raise ValueError(
                f"Scheme {self.name!r}: group_size={self.group_size!r} is not supported: its kernels take "
                f"{sorted(self.group_sizes) or 'one scale per output channel (`None`)'}."
            )

    @property
    def is_quantized(self) -> bool:
        """True if the scheme changes any weight."""
        return self.grid is not None

    @property
    def nests(self) -> bool:
        """True if schemes of fewer bits nest in it: their scales are multiples of its own, in the same container."""
        return self.grid is not None and self.grid.has_signed_scales and self.activation is None

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Group sizes that the engine's kernels accept, largest first; empty for one scale per output channel."""
        # CUTLASS' product of INT4 and FP8 has only the largest.
        return self.container.group_sizes[:1] if self.activation == E4M3 else self.container.group_sizes

    @property
    def has_fp8_scales(self) -> bool:
        """True if the engine converts the scales of groups to FP8: INT4 weights with FP8 activations."""
        return self.group_size is not None and self.activation == E4M3

    @property
    def scale_dtype(self) -> str | None:
        """Dtype of the weight scales; `None` for the dtype in which the engine runs the model."""
        if self.has_fp8_scales:
            return "bfloat16"
        is_per_channel = self.activation is not None and self.group_size is None
        return "float32" if is_per_channel else self.container.scale_dtype

    def group_size_for(self, in_features: int) -> int | None:
        """Return the group size of a matrix with `in_features` input features: the largest of `group_sizes` up to
        `group_size` that divides them. `ValueError` is raised if none does, or if a row of codes does not fill whole
        words of the checkpoint."""
        if self.group_size is None:
            codes_per_word = self.container.word_size
            if in_features % codes_per_word:
                raise ValueError(
                    f"in_features={in_features} is not divisible by {codes_per_word}, the number of codes that the "
                    f"checkpoint of scheme {self.name!r} packs into a word. Leave the layer out with `exclude_modules`, "
                    "or use a scheme that does not pack codes (`w8a8`, `fp8`)."
                )
            return None
        allowed = [size for size in self.group_sizes if size <= self.group_size]
        if fitting := [size for size in allowed if in_features % size == 0]:
            return fitting[0]
        raise ValueError(
            f"in_features={in_features} is not divisible by any group size of {allowed}, so scheme {self.name!r} with "
            f"group_size={self.group_size} cannot quantize it. Leave the layer out with `exclude_modules`, or use a "
            "scheme with one scale per output channel (`w8a8`, `w8a16`, `fp8`)."
        )

    def weight_args(self, group_size: int | None) -> dict[str, Any]:
        """Return compressed-tensors' `QuantizationArgs` of a weight quantized with `group_size`. They describe the
        container, which a reader unpacks; a coarser grid leaves some of its codes unused."""
        container = self.container
        strategy = "channel" if group_size is None else "tensor_group" if container.has_global_scale else "group"
        scale_dtype = container.scale_dtype and f"torch.{container.scale_dtype}"
        args = {"num_bits": container.num_bits, "type": container.type, "symmetric": True, "dynamic": False}
        args |= {"strategy": strategy, "group_size": group_size, "scale_dtype": scale_dtype}
        return {name: value for name, value in args.items() if value is not None}

    @property
    def activation_args(self) -> dict[str, Any] | None:
        """compressed-tensors' `QuantizationArgs` of the activations, or `None`."""
        if self.activation is None:
            return None
        grid = {"num_bits": self.activation.num_bits, "type": self.activation.type}
        return grid | {"symmetric": True, "strategy": "token", "dynamic": True}


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        QuantScheme("w4a16", INT4_SIGNED, INT4_PACKED, 128),
        QuantScheme("w8a16", INT8, INT8_PACKED),
        QuantScheme("w8a8", INT8, INT8_CODES, activation=INT8),
        QuantScheme("fp8", E4M3, E4M3_CODES, activation=E4M3),
        # vLLM converts its scales to FP8, which loses nothing only for positive ones.
        QuantScheme("w4a8", INT4, INT4_PACKED, 128, E4M3),
        QuantScheme("mxfp4a16", E2M1, MXFP4, 32),
        QuantScheme("nvfp4a16", E2M1, NVFP4, 16),
        QuantScheme("w3a16", INT3_SIGNED, INT4_PACKED, 128),
        QuantScheme("w2a16", INT2_SIGNED, INT4_PACKED, 128),
        QuantScheme("w4a8-int8", INT4_SIGNED, INT4_PACKED, 128, INT8),
        QuantScheme("bf16", None, DENSE),
    )
}


# Other names of schemes, which are too far from their own to be spelling mistakes.
_ALSO = {
    "w4a16": ("int4", "4bit", "awq", "gptq", "nf4"),
    "w8a8": ("int8", "8bit"),
    "bf16": ("none", "bfloat16", "fp16", "float16", "fp32", "float32"),
}


def get_scheme(scheme: str | QuantScheme, group_size: int | None = None) -> QuantScheme:
    """Look up a scheme by name, or return a [`QuantScheme`] as it is; `group_size` replaces its own group size.
    `ValueError` is raised for an unknown name, or a group size that the scheme's kernels do not take."""
    if isinstance(scheme, str):
        if scheme not in SCHEMES:
            # compressed-tensors spells it `W4A16`.
            name = scheme.lower().replace("_", "-")
            stem = name.partition("-")[0]
            meant = [n for n in (name, stem) if n in SCHEMES] or [n for n, names in _ALSO.items() if name in names]
            meant = meant or get_close_matches(name, SCHEMES, n=1)
            hint = f" Did you mean {meant[0]!r}?" if meant else ""
            if stem in ("mxfp4", "nvfp4", "mxfp4a4", "nvfp4a4"):
                hint = (
                    " Activations of 4 bits are unsupported: their scale is a calibrated constant, from which a policy in training "
                    "moves away, and no engine on a CPU computes with them. Use 'nvfp4a16' or 'mxfp4a16'."
                )
            elif "asym" in name:
                hint = " Zero points are unsupported. Use 'w4a16' or 'w8a16'."
            raise ValueError(f"Unknown scheme {scheme!r}. Choose one of {sorted(SCHEMES)}.{hint}")
        scheme = SCHEMES[scheme]
    if group_size is None:
        return scheme
    if scheme.group_size is None:
        raise ValueError(
            f"group_size={group_size} was given, but scheme {scheme.name!r} has no groups. Remove `group_size`, or use "
            "scheme 'w4a16'."
        )
    return replace(scheme, group_size=group_size)
