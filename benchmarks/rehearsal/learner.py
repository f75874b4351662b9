"""
The learner's forward and backward on tensors of a GPU that is not there: `python learner.py X.Y`, its compute
capability.

PyTorch's fake tensors have device, dtype, shape and strides, and no numbers. Each operation is looked at on its way:
operands on several devices, tensors of this package that stay on the CPU, what `_int_mm` and `_scaled_mm` check on a
GPU, and waits for a GPU. Autograd's engine needs a device, so every product of a low-bit weight is given a gradient
where it is called. Fake tensors have no routes; experts get fixed numbers of rows, none for one of them. Needs a build
of PyTorch for CUDA.
"""

import sys
import traceback
from argparse import ArgumentParser
from collections import Counter
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from transformers import AutoModelForCausalLM  # noqa: E402

from testing_utils import make_mixture, make_tiny_config  # noqa: E402
from trl_qarl import prepare_model  # noqa: E402
from trl_qarl.quantization import experts, tensors  # noqa: E402
from trl_qarl.quantization.experts import QuantizedExperts  # noqa: E402
from trl_qarl.quantization.formats.fp4 import Nvfp4  # noqa: E402
from trl_qarl.quantization.schemes import get_scheme  # noqa: E402
from trl_qarl.quantization.swap import quantized_layers  # noqa: E402


SCHEMES = (
    "w4a16",
    "w8a16",
    "w8a8",
    "fp8",
    "w4a8",
    "mxfp4a16",
    "nvfp4a16",
    "w3a16",
    "w2a16",
)
CASES = [("qwen2", scheme) for scheme in SCHEMES]
CASES += [(arch, scheme) for arch in ("qwen3", "llama") for scheme in ("w4a16", "fp8")]
CASES += [("mixture", scheme) for scheme in ("w4a16", "w8a16", "w8a8", "fp8")]

ROWS = ((1, 1), (1, 16), (1, 17), (4, 40))
"""Batch and length of the token ids: the last is more rows than any limit of a product."""


CONSTANTS = ("aten::lift_fresh", "prim::device", "aten::_to_copy")
"""Operations by which `torch.tensor(numbers, device="cuda")` gets there."""


class Watch(TorchDispatchMode):
    """Collects what would fail on a GPU, and where the CPU would wait for one."""

    def __init__(self):
        super().__init__()
        self.problems: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device.type for tensor in operands if tensor.ndim}
        name = function.name()
        if name == "aten::_local_scalar_dense":
            self.waits[place()] += 1
            return 1.0 if operands[0].is_floating_point() else 1
        if len(devices) > 1:
            self.problems[f"{name} has operands on {sorted(devices)} ({place()})"] += 1
        elif devices == {"cpu"} and place() != "elsewhere" and name not in CONSTANTS:
            self.problems[f"{name} runs on the CPU ({place()})"] += 1
        for problem in problems_of_product(name, operands):
            self.problems[f"{name}: {problem} ({place()})"] += 1
        return function(*args, **kwargs)


def problems_of_product(name, operands):
    """Yield what `_int_mm` and `_scaled_mm` would raise for on a GPU, by the checks in PyTorch's sources."""
    if name not in ("aten::_int_mm", "aten::_scaled_mm"):
        return
    a, b = operands[:2]
    (m, k), n = a.shape, b.shape[1]
    if name == "aten::_int_mm":
        if m <= 16 or k % 8 or n % 8:
            yield f"({m}, {k}) by ({k}, {n}), which takes more than 16 rows and multiples of 8"
        return
    if k % 16 or n % 16:
        yield f"({m}, {k}) by ({k}, {n}), which takes multiples of 16"
    if a.stride() != (k, 1) or b.stride() != (1, k):
        yield f"strides {a.stride()} and {b.stride()}, not those of a row-major and a column-major matrix"
    scales = operands[2:4]
    shapes = [tuple(scale.shape) for scale in scales]
    is_right = all(scale.dtype is torch.float32 and scale.is_contiguous() for scale in scales)
    if shapes != [(m, 1), (1, n)] or not is_right:
        yield f"scales {shapes}, {[scale.dtype for scale in scales]}, not contiguous float32 of ({m}, 1) and (1, {n})"


def place() -> str:
    """File and function of this package that called last, or "elsewhere"."""
    for frame in reversed(traceback.extract_stack(limit=60)):
        if "/trl_qarl/" in frame.filename:
            return f"{frame.filename.rpartition('/trl_qarl/')[2]}, {frame.name}"
    return "elsewhere"


class Context:
    """Stands in for the context that autograd gives to a function."""

    def __init__(self, needs_input_grad):
        self.needs_input_grad = needs_input_grad

    def save_for_backward(self, *saved):
        self.saved_tensors = saved


def with_gradient(function, calls: Counter):
    """Return `apply` of an autograd function, with a backward after each forward whose gradients are those of the
    operands."""

    def apply(*args):
        # What has a gradient: rows, masters and biases, which are ordinary tensors of floating point.
        takes = [type(a) is not tensors.LowBitTensor and isinstance(a, torch.Tensor) and a.is_floating_point() for a in args]  # fmt: skip
        context = Context(takes)
        with torch.no_grad():
            y = function.forward(context, *args)
            gradients = function.backward(context, torch.empty_like(y))
        for operand, takes_gradient, gradient in zip(args, takes, gradients, strict=True):
            described = (
                [(x.device, x.dtype, x.shape) for x in (operand, gradient)] if takes_gradient else [None, gradient]
            )
            assert described[0] == described[1], f"{function.__name__}: gradient {described[1]} of {described[0]}"
        calls[function.__name__] += 1
        return y

    return apply


class Counts(list):
    """Numbers of rows of each expert, as a tensor has them."""

    def __getitem__(self, key):
        return Counts(super().__getitem__(key)) if isinstance(key, slice) else super().__getitem__(key)

    def tolist(self):
        return list(self)


def counts_of(slots, minlength):
    """All rows among the experts, evenly, but for the last, which has none."""
    busy = minlength - 2
    share, rest = divmod(len(slots), busy)
    return Counts([share + (i < rest) for i in range(busy)] + [0, 0])


def run(kind: str, scheme: str, capability: tuple[int, int]) -> str:
    """Run one model at all numbers of rows, and describe what ran; `AssertionError` for what would fail."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        # What happens once, before a run, may wait.
        with Watch():
            if kind == "mixture":
                model = make_mixture()
            else:
                model = AutoModelForCausalLM.from_config(make_tiny_config(kind), dtype=torch.float32)
            prepare_model(model, scheme, scale_dtype=torch.bfloat16)
        calls: Counter[str] = Counter()
        functions = {tensors: "_StraightThroughLinear", experts: "_GroupedLinear"}
        originals = {module: getattr(module, name).apply for module, name in functions.items()}
        for module, name in functions.items():
            getattr(module, name).apply = with_gradient(getattr(module, name), calls)
        bincount = torch.bincount
        experts.torch.bincount = counts_of
        try:
            with Watch() as watch:
                for shape in ROWS:
                    ids = torch.zeros(shape, dtype=torch.long)
                    with torch.autocast("cuda", torch.bfloat16):
                        logits = model(input_ids=ids, use_cache=False).logits
                    assert logits.device.type == "cuda" and logits.dtype is torch.bfloat16
        finally:
            torch.bincount = bincount
            for module, name in functions.items():
                getattr(module, name).apply = originals[module]
    assert not watch.problems, "\n  ".join(["", *watch.problems])
    waits = {where for where in watch.waits if where != "elsewhere"}
    # Its one scale for a matrix decides which others it gets.
    known = {f"quantization/formats/fp4.py, {Nvfp4.choose_parts.__name__}"} if scheme == "nvfp4a16" else set()
    assert waits <= known, f"the CPU waits for the GPU in {waits - known}"
    layers = quantized_layers(model).values()
    kernels = sorted({str(layer.kernel_name) for layer in layers})
    check_kernels(get_scheme(scheme), [k for layer in layers for k in [str(layer.kernel_name)] if not isinstance(layer, QuantizedExperts)], capability)  # fmt: skip
    assert calls["_StraightThroughLinear"] and (kind == "mixture" or not calls["_GroupedLinear"])
    return f"{sum(calls.values())} products with gradients: {'; '.join(kernels)}"


def check_kernels(scheme, kernels, capability) -> None:
    """docs/schemes.md, "Products"."""
    if scheme.activation is None:
        expected = "expanded to bfloat16 + aten::linear"
    elif scheme.activation.type == "int":
        expected = "aten::_int_mm"
    else:
        expected = (
            "aten::_scaled_mm (row-wise FP8)" if capability >= (8, 9) else "E4M3 expanded to bfloat16 + aten::linear"
        )
    wrong = {kernel for kernel in kernels if expected not in kernel}
    assert kernels and not wrong, f"{wrong} ran in place of {expected!r}"


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("capability", metavar="X.Y")
    text = parser.parse_args().capability
    capability = tuple(map(int, text.split(".")))
    torch.cuda.get_device_capability = lambda *_: capability
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    # Else there is no autocast. `is_available` stays false: fake tensors would start a real context.
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    num_failed = 0
    for kind, scheme in CASES:
        try:
            print(f"{text} {kind} {scheme}: {run(kind, scheme, capability)}", flush=True)
        except Exception as error:
            num_failed += 1
            where = [f"{f.filename.split('/')[-1]}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
            print(f"{text} {kind} {scheme}: FAILED {type(error).__name__}: {error} ({' '.join(where[-6:])})")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
