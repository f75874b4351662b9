"""
Quantization schemes: one frozen description per scheme, read by every other part of the package.

A scheme says on which *grid* the codes of a weight lie, in which *container* they are stored, sent and multiplied, how
many input features share a scale, and on which grid the activations that meet it lie. Engine, checkpoint and kernels
see only the container, so a policy of 3 bits runs wherever INT4 does. Nothing here imports torch, so the command line
can list schemes at once; the arithmetic is in [`trl_qarl.quantization.formats`].
"""

from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal


__all__ = ["CONTAINERS", "GRIDS", "GROUP_SIZES", "SCHEMES", "Container", "Grid", "QuantScheme", "get_scheme"]

GROUP_SIZES = (128, 64, 32)
"""Group sizes that both the CPU and the CUDA INT4 kernels with 16-bit activations accept, largest first."""


@dataclass(frozen=True)
class Grid:
    """The codes that a number can be rounded to, and how a scale follows from the numbers that share it: their largest
    magnitude is half the range of codes, unless one of the two last fields says otherwise."""

    name: str
    type: Literal["int", "float"]  # compressed-tensors' word
    num_bits: int  # that tell the codes apart
    has_signed_scales: bool = False  # the largest number, with its sign, is the smallest code
    has_zero_points: bool = False  # codes go from the smallest number to the largest; the code of zero is shared too

    @property
    def quant_range(self) -> tuple[float, float]:
        """Smallest and largest code."""
        if self.type == "float":
            return (-6.0, 6.0) if self.num_bits == 4 else (-448.0, 448.0)
        return float(-(2 ** (self.num_bits - 1))), float(2 ** (self.num_bits - 1) - 1)

    @property
    def scale_divisor(self) -> float:
        """
        Divisor of the largest number that gives the scale: half the code range, as compressed-tensors has it (7.5 for
        INT4, 127.5 for INT8, 6 for E2M1, 448 for E4M3), or the smallest code where scales are signed (-8 for INT4).
        With zero points the distance of the smallest from the largest is divided, by the whole range (15 for INT4).
        """
        qmin, qmax = self.quant_range
        whole = qmax - qmin
        return whole if self.has_zero_points else qmin if self.has_signed_scales else whole / 2


INT2, INT3, INT4, INT8 = (Grid(f"int{bits}", "int", bits) for bits in (2, 3, 4, 8))
INT2_SIGNED, INT3_SIGNED, INT4_SIGNED = (Grid(f"int{bits}-signed", "int", bits, True) for bits in (2, 3, 4))
INT4_ASYM, INT8_ASYM = (Grid(f"int{bits}-asym", "int", bits, has_zero_points=True) for bits in (4, 8))
E2M1, E4M3 = Grid("e2m1", "float", 4), Grid("e4m3", "float", 8)
_GRIDS = (INT2, INT3, INT4, INT2_SIGNED, INT3_SIGNED, INT4_SIGNED, INT4_ASYM, INT8, INT8_ASYM, E2M1, E4M3)
GRIDS = {grid.name: grid for grid in _GRIDS}


@dataclass(frozen=True)
class Container:
    """How codes are stored, sent and multiplied; [`trl_qarl.quantization.formats`] has what is done with them."""

    name: str
    type: Literal["int", "float"] | None  # None: weights stay as they are
    num_bits: int  # that a code takes, and that a checkpoint says it has
    checkpoint_format: str  # compressed-tensors' name of it
    word_size: int = 1  # codes in a word of the checkpoint; rows fill whole words
    group_sizes: tuple[int, ...] = ()  # that its kernels accept, largest first; empty for a scale per output channel
    activations: tuple[Grid | None, ...] = (None,)  # that its kernels multiply with; None: left alone
    has_zero_points: bool = False  # holds grids with zero points, and no others
    has_global_scale: bool = False  # all scales of what an engine holds as one matrix are divided by one number
    takes_signed_scales: bool = False  # which all its kernels for 16-bit activations multiply by as they are
    scale_dtype: str | None = None  # None: a matter of the scheme

    def holds(self, grid: Grid | None) -> bool:
        """Return whether every code of `grid` is one of the container's, `None` standing for no grid at all."""
        if grid is None or self.type is None:
            return grid is None and self.type is None
        if (grid.has_signed_scales and not self.takes_signed_scales) or grid.has_zero_points != self.has_zero_points:
            return False
        # Integers of fewer bits are integers of more; floating-point codes of fewer are not.
        return grid.type == self.type and (
            grid.num_bits <= self.num_bits if grid.type == "int" else grid.num_bits == self.num_bits
        )


INT4_PACKED = Container(
    "int4-packed", "int", 4, "pack-quantized", 8, GROUP_SIZES, (None, E4M3, INT8), takes_signed_scales=True
)
INT4_ZERO_POINTS = Container("int4-zero-points", "int", 4, "pack-quantized", 8, GROUP_SIZES, has_zero_points=True)
INT8_ZERO_POINTS = Container("int8-zero-points", "int", 8, "pack-quantized", 4, GROUP_SIZES, has_zero_points=True)
INT8_PACKED = Container("int8-packed", "int", 8, "pack-quantized", 4)
INT8_CODES = Container("int8", "int", 8, "int-quantized", activations=(INT8,))
MXFP4 = Container("mxfp4", "float", 4, "mxfp4-pack-quantized", group_sizes=(32,), scale_dtype="uint8")
NVFP4 = Container(
    "nvfp4", "float", 4, "nvfp4-pack-quantized", 1, (16,), has_global_scale=True, scale_dtype="float8_e4m3fn"
)
E4M3_CODES = Container("e4m3", "float", 8, "float-quantized", activations=(E4M3,))
DENSE = Container("dense", None, 16, "dense")
_INTEGERS = (INT4_PACKED, INT4_ZERO_POINTS, INT8_PACKED, INT8_ZERO_POINTS, INT8_CODES)
CONTAINERS = {container.name: container for container in (*_INTEGERS, MXFP4, NVFP4, E4M3_CODES, DENSE)}


@dataclass(frozen=True)
class QuantScheme:
    """One quantization scheme; `name` is what [`QaRLConfig`] takes. `ValueError` is raised if the grid has codes that
    the container does not hold, or if no kernel multiplies the container with such groups or activations."""

    name: str
    grid: Grid | None  # codes of the weights; None: weights stay in high precision
    container: Container  # how they are stored, sent and multiplied
    group_size: int | None = None  # input features that share a scale; None: one scale per output channel
    activation: Grid | None = None  # codes of dynamic per-token activations; None: left alone

    def __post_init__(self) -> None:
        if not self.container.holds(self.grid):
            fitting = [name for name, grid in GRIDS.items() if self.container.holds(grid)] or ["None"]
            raise ValueError(
                f"Scheme {self.name!r}: container {self.container.name!r} does not hold the codes of grid "
                f"{self.grid and self.grid.name!r}, only those of {', '.join(fitting)}. Choose another of "
                f"{[name for name, container in CONTAINERS.items() if container.holds(self.grid)]}."
            )
        if self.activation not in self.container.activations:
            allowed = [grid and grid.name for grid in self.container.activations]
            raise ValueError(
                f"Scheme {self.name!r}: no kernel multiplies container {self.container.name!r} with activations in "
                f"{self.activation and self.activation.name!r}. Choose one of {allowed}."
            )
        if self.grid is not None and self.grid.has_signed_scales and self.activation == E4M3:
            raise ValueError(
                f"Scheme {self.name!r}: grid {self.grid.name!r} does not go with activations in {E4M3.name!r}. Signed scales are for "
                "weights of at most 4 bits that meet 16-bit or INT8 activations: the scales of 'w4a8' are chosen such that vLLM's "
                "conversion to FP8 loses nothing, which holds only for positive ones, and 8 bits have next to nothing to gain. Use "
                "'w4a16', or another grid."
            )
        if self.group_size not in (self.group_sizes or (None,)):
            raise ValueError(
                f"Scheme {self.name!r}: group_size={self.group_size} is not supported: its kernels take "
                f"{sorted(self.group_sizes) or 'one scale per output channel (`None`)'}."
            )

    @property
    def is_quantized(self) -> bool:
        """True if the scheme changes any weight."""
        return self.grid is not None

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Group sizes that the engine's kernels accept, largest first; empty for one scale per output channel."""
        # CUTLASS' product of INT4 and FP8 has this one.
        return self.container.group_sizes[:1] if self.activation == E4M3 else self.container.group_sizes

    @property
    def has_fp8_scales(self) -> bool:
        """True if the engine turns the scales of groups into FP8: INT4 weights that meet FP8 activations."""
        return self.group_size is not None and self.activation == E4M3

    @property
    def scale_dtype(self) -> str | None:
        """Dtype of the weight scales; `None` for the dtype in which the engine runs the model."""
        if self.has_fp8_scales:
            return "bfloat16"
        is_per_channel = self.activation is not None and self.group_size is None
        return "float32" if is_per_channel else self.container.scale_dtype

    def group_size_for(self, in_features: int) -> int | None:
        """Return the group size of a matrix with `in_features` input features: `group_size` where that divides them,
        else the next smaller size of `group_sizes` that does. `ValueError` is raised if none does, or if the
        checkpoint packs codes into words that they do not fill."""
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
        for size in allowed:
            if in_features % size == 0:
                return size
        raise ValueError(
            f"in_features={in_features} is not divisible by any group size of {allowed}, so scheme {self.name!r} with "
            f"group_size={self.group_size} cannot quantize it. Leave the layer out with `exclude_modules`, or use a "
            "scheme with one scale per output channel (`w8a8`, `w8a16`, `fp8`)."
        )

    def weight_args(self, group_size: int | None) -> dict[str, Any]:
        """Return compressed-tensors' `QuantizationArgs` of a weight quantized with `group_size`. They describe the
        container, which is what a reader unpacks: of a coarser grid some codes do not occur."""
        container = self.container
        args: dict[str, Any] = {"num_bits": container.num_bits, "type": container.type}
        args |= {"symmetric": not container.has_zero_points, "dynamic": False}
        if group_size is None:
            args["strategy"] = "channel"
        else:
            args |= {"strategy": "tensor_group" if container.has_global_scale else "group", "group_size": group_size}
        if container.scale_dtype is not None:
            args["scale_dtype"] = f"torch.{container.scale_dtype}"
        return args

    @property
    def activation_args(self) -> dict[str, Any] | None:
        """compressed-tensors' `QuantizationArgs` of the activations, or `None`."""
        if self.activation is None:
            return None
        described = {"num_bits": self.activation.num_bits, "type": self.activation.type, "symmetric": True}
        return {**described, "strategy": "token", "dynamic": True}


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        QuantScheme("w4a16", INT4_SIGNED, INT4_PACKED, 128),
        QuantScheme("w8a16", INT8, INT8_PACKED),
        QuantScheme("w8a8", INT8, INT8_CODES, activation=INT8),
        QuantScheme("fp8", E4M3, E4M3_CODES, activation=E4M3),
        QuantScheme("w4a8", INT4, INT4_PACKED, 128, E4M3),
        QuantScheme("mxfp4a16", E2M1, MXFP4, 32),
        QuantScheme("nvfp4a16", E2M1, NVFP4, 16),
        QuantScheme("w3a16", INT3_SIGNED, INT4_PACKED, 128),
        QuantScheme("w2a16", INT2_SIGNED, INT4_PACKED, 128),
        QuantScheme("w4a8-int8", INT4_SIGNED, INT4_PACKED, 128, INT8),
        QuantScheme("w3a8-int8", INT3_SIGNED, INT4_PACKED, 128, INT8),
        QuantScheme("w2a8-int8", INT2_SIGNED, INT4_PACKED, 128, INT8),
        QuantScheme("w4a16-observer", INT4, INT4_PACKED, 128),
        QuantScheme("w3a16-observer", INT3, INT4_PACKED, 128),
        QuantScheme("w2a16-observer", INT2, INT4_PACKED, 128),
        QuantScheme("w4a16-asym", INT4_ASYM, INT4_ZERO_POINTS, 128),
        QuantScheme("w8a16-asym", INT8_ASYM, INT8_ZERO_POINTS, 128),
        QuantScheme("bf16", None, DENSE),
    )
}


def get_scheme(scheme: str | QuantScheme, group_size: int | None = None) -> QuantScheme:
    """Look a scheme up by name, or return a [`QuantScheme`] as it is; with `group_size` in the place of its own.
    `ValueError` is raised for an unknown name, or a group size that the scheme's kernels do not take."""
    if isinstance(scheme, str):
        if scheme not in SCHEMES:
            # compressed-tensors has `W4A16_ASYM`.
            name = scheme.lower().replace("_", "-")
            stem = name.partition("-")[0]
            meant = [n for n in (name, stem) if n in SCHEMES] or get_close_matches(name, SCHEMES, n=1)
            hint = f" Did you mean {meant[0]!r}?" if meant else ""
            if stem in ("mxfp4", "nvfp4", "mxfp4a4", "nvfp4a4"):
                hint = (
                    " There are no 4-bit activations: their scale is a calibrated constant, which a policy in training moves away "
                    "from, and no engine on a CPU computes with them. Use 'nvfp4a16' or 'mxfp4a16'."
                )
            elif "asym" in name and name not in SCHEMES:
                hint = (
                    " Zero points are for integer weights of 4 or 8 bits that meet 16-bit activations: no kernel has them with others, "
                    "and fewer bits do not nest with them. Use 'w4a16-asym', 'w8a16-asym', or the scheme without zero points."
                )
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
