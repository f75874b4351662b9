"""Times of the learner: training steps and decoding, the quantized model against `nn.Linear`."""

import statistics
import time
from argparse import Namespace
from functools import partial
from typing import TYPE_CHECKING, Any

from .engines import kernels_run
from .machine import describe_machine, forget_peak, peak_bytes
from .shapes import make_config, random_model


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trl_qarl.quantization.swap import SwapReport
    from trl_qarl.quantization.weight import QuantizedLayer


def prepare_variants(
    model: "PreTrainedModel", schemes: list[str], dtype: str = "bfloat16"
) -> tuple[dict[str | None, "PreTrainedModel"], dict[str, "SwapReport"]]:
    """
    Return a copy of `model` per scheme, sharing its master weights.

    Args:
        model (`PreTrainedModel`):
            Unquantized model.
        schemes (`list[str]`):
            Schemes with quantized weights.
        dtype (`str`, *optional*, defaults to `"bfloat16"`):
            Dtype in which the engine would run the model.

    Returns:
        Models by scheme, `model` itself under `None`, and the swap reports by scheme.
    """
    import copy

    import torch

    from trl_qarl.quantization.swap import prepare_model

    master_weights = {id(parameter): parameter for parameter in model.parameters()}
    variants: dict[str | None, PreTrainedModel] = {None: model}
    reports = {}
    for name in schemes:
        variants[name] = copy.deepcopy(model, memo=dict(master_weights))
        reports[name] = prepare_model(variants[name], name, scale_dtype=getattr(torch, dtype))
    return variants, reports


def run_benchmark(
    variants: dict[str | None, "PreTrainedModel"],
    reports: dict[str, "SwapReport"],
    tokens: list[int],
    *,
    is_decode: bool = False,
    sequence_length: int = 512,
    dtype: str = "bfloat16",
    repeats: int = 5,
) -> dict[str, Any]:
    """
    Time the models of [`prepare_variants`] against each other.

    Args:
        variants (`dict[str | None, PreTrainedModel]`):
            Models by scheme; `None` is the baseline. Weights in another dtype than `dtype` run under autocast.
        reports (`dict[str, SwapReport]`):
            Swap reports by scheme.
        tokens (`list[int]`):
            Batch sizes in tokens.
        is_decode (`bool`, *optional*, defaults to `False`):
            Forward of `tokens` sequences of one token, instead of forward + backward of `tokens` tokens in sequences
            of up to `sequence_length`.
        sequence_length (`int`, *optional*, defaults to `512`):
            Longest sequence of a batch.
        dtype (`str`, *optional*, defaults to `"bfloat16"`):
            Compute dtype.
        repeats (`int`, *optional*, defaults to `5`):
            Timed repeats, after one that is not counted.

    Returns:
        `{"mode", "model", "machine", "repeats", "rows"}`: one row per scheme and batch size, the baseline's
        (`"scheme": None`) first. Times are medians in seconds, `extra_memory` is relative to the bf16 weights,
        `peak_bytes` is of a GPU alone and includes what the other variants hold.
    """
    import torch

    from trl_qarl.quantization.swap import quantized_layers

    model = variants[None]
    compute_dtype = getattr(torch, dtype)
    layer_names = list(next(iter(reports.values())).converted)
    block = layer_names[: max(1, len(layer_names) // model.config.num_hidden_layers)]

    rows = []
    for num_tokens in tokens:
        length = 1 if is_decode else min(sequence_length, num_tokens)
        batch = torch.randint(model.config.vocab_size, (num_tokens // length, length), device=model.device)
        steps = {name: _step(variant, batch, is_decode, compute_dtype) for name, variant in variants.items()}
        linears = {
            name: _linear_step([variant.get_submodule(n) for n in block], batch.numel(), is_decode, compute_dtype)
            for name, variant in variants.items()
        }
        step_times = _interleave(steps, repeats, model.device)
        kernels = {name: kernels_run(variant) for name, variant in variants.items()}
        linear_times = _interleave(linears, repeats, model.device)
        for name, variant in variants.items():
            row: dict[str, Any] = {"scheme": name, "tokens": batch.numel(), "kernels": kernels[name]}
            row |= _summary("step", step_times, name) | _summary("linear", linear_times, name)
            forget_peak()
            steps[name]()
            if (peak := peak_bytes()) is not None:
                row["peak_bytes"] = peak
            if name is not None:
                layers = list(quantized_layers(variant).values())
                row["extra_memory"] = sum(map(_cached_bytes, layers)) / reports[name].bf16_bytes
                times = _interleave({name: partial(_requantize, layers)}, repeats, model.device)
                row["quantize_seconds"] = statistics.median(times[name])
            rows.append(row)
    return {
        "mode": "decode" if is_decode else "learner",
        "model": _describe_model(model, dtype, None if is_decode else sequence_length),
        "machine": describe_machine(),
        "repeats": repeats,
        "rows": rows,
    }


def load_model(args: Namespace) -> "PreTrainedModel":
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = getattr(torch, args.dtype)
    if args.model_name_or_path is None:
        return random_model(make_config(args.shapes or "smollm2-135m", args.num_layers), dtype).train()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    config = AutoConfig.from_pretrained(args.model_name_or_path)
    if args.num_layers is not None:
        config.num_hidden_layers = args.num_layers
    return AutoModelForCausalLM.from_pretrained(args.model_name_or_path, config=config, dtype=dtype).to(device).train()


def _step(model, batch, is_decode, dtype):
    import torch

    def run():
        with torch.set_grad_enabled(not is_decode), _autocast(model.device, model.dtype, dtype):
            output = model(input_ids=batch, labels=None if is_decode else batch, use_cache=False)
        if not is_decode:
            output.loss.backward()
            model.zero_grad(set_to_none=True)

    return run


def _linear_step(layers, num_tokens, is_decode, dtype):
    import torch

    device, weight_dtype = layers[0].weight.device, layers[0].weight.dtype
    widths = {layer.in_features for layer in layers} | {layer.out_features for layer in layers}
    tensors = {width: torch.randn(num_tokens, width, device=device, dtype=dtype) for width in widths}

    def run():
        for layer in layers:
            x = tensors[layer.in_features].detach().requires_grad_(not is_decode)
            with torch.set_grad_enabled(not is_decode), _autocast(device, weight_dtype, dtype):
                y = layer(x)
            if not is_decode:
                y.backward(tensors[layer.out_features])
                layer.weight.grad = None

    return run


def _autocast(device, weight_dtype, dtype):
    import torch

    return torch.autocast(device.type, dtype=dtype, enabled=weight_dtype is not dtype)


def _interleave(functions, repeats, device):
    """Seconds of each function over `repeats` rounds, after a round that is not counted."""
    import torch
    from tqdm import tqdm

    synchronize = torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    times = {name: [] for name in functions}
    for round_index in tqdm(range(repeats + 1), leave=False, disable=None):
        for name, function in functions.items():
            synchronize()
            start = time.perf_counter()
            function()
            synchronize()
            if round_index:
                times[name].append(time.perf_counter() - start)
    return times


def _summary(prefix, times, name):
    ratios = [seconds / baseline for seconds, baseline in zip(times[name], times[None], strict=True)]
    return {f"{prefix}_seconds": statistics.median(times[name]), f"{prefix}_ratio": statistics.median(ratios)}


def _requantize(layers) -> None:
    for layer in layers:
        layer.invalidate()
        layer.low_bit_weight()


def _cached_bytes(layer: "QuantizedLayer") -> int:
    """Bytes of every tensor that `layer` holds besides its parameters and buffers."""
    import torch
    from torch.utils._pytree import tree_leaves

    from trl_qarl.quantization.tensors import LowBitTensor

    held = [low_bit for weight in layer.quantized_weights.values() for low_bit, _ in weight._kept.values()]
    for leaf in held:
        if isinstance(leaf, LowBitTensor):
            # Its own size is that of the weight it stands for. What it holds may be low-bit too, and is visited in
            # turn.
            held += tree_leaves([*leaf.parts(), *leaf._kept.values()])
    return sum(leaf.nbytes for leaf in held if isinstance(leaf, torch.Tensor) and not isinstance(leaf, LowBitTensor))


def _describe_model(model, dtype, sequence_length) -> str:
    config = model.config
    name = config.name_or_path or f"a random {config.model_type}"
    weights = "" if str(model.dtype).endswith(dtype) else f", {str(model.dtype).removeprefix('torch.')} master weights"
    sequences = "" if sequence_length is None else f", sequences of {sequence_length} tokens"
    return (
        f"{name} ({config.num_hidden_layers} layers, hidden size {config.hidden_size}, "
        f"vocabulary {config.vocab_size}, {dtype}{weights}{sequences})"
    )
