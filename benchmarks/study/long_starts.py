"""
Better starts for the low-bit policies of benchmarks/study/long_study.py than rounding to nearest. Each one changes the
master weights before the first update. Compared in the section "A better start" of benchmarks/study/README.md.
"""

import copy
import tempfile

import chain_sums
import divergence
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import DistillationConfig
from warm_start import warm_start

from trl_qarl import get_scheme
from trl_qarl.quantization.swap import disable_quantized_forward, quantized_layers
from trl_qarl.quantization.tensors import LowBitTensor


NUM_SAMPLES, BATCH_SIZE, NUM_DISTILLED = 256, 16, 40


def improve_start(trainer, start: str) -> None:
    """Apply the start `mse` or `gptq` to a trainer whose model is quantized."""
    if start == "mse":
        clip_to_best_scale(trainer.model)
    else:
        problems, _ = chain_sums.make_problems(chain_sums.chain_steps(trainer.model))
        tokens, _ = sample_answers(trainer, problems[:NUM_SAMPLES])
        round_by_gptq(trainer, tokens)


@torch.no_grad()
def clip_to_best_scale(model) -> None:
    """
    Clip the weights of each group to the share of the largest one with the least squared error in low bits.

    The scale follows from the largest weight, so every group begins with its best scale.
    """
    for layer in quantized_layers(model).values():
        weight = layer.weight.detach().clone()
        size = layer.scheme.group_size_for(weight.shape[1]) or weight.shape[1]
        groups = weight.view(weight.shape[0], -1, size)
        largest = groups.abs().amax(-1, keepdim=True)
        best, least = groups.clone(), torch.full_like(largest, float("inf"))
        for share in torch.linspace(1.0, 0.5, 26):
            clipped = groups.clamp(-share * largest, share * largest)
            error = (_low_bit(layer, clipped.view_as(weight)).view_as(groups) - groups).square().sum(-1, keepdim=True)
            best, least = torch.where(error < least, clipped, best), torch.minimum(error, least)
        layer.weight.copy_(best.view_as(weight))


def sample_answers(trainer, problems: list[dict[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens `(B, T)` of problems with answers from the unquantized model, and a mask of the answers."""
    model, tokenizer = trainer.model, trainer.processing_class
    disable_quantized_forward(model)
    texts = chain_sums.answer_problems(model, tokenizer, problems, 1.0, trainer.args.bf16)
    for layer in quantized_layers(model).values():
        layer.use_quantized_forward = True
    rows = [
        tokenizer(problem["prompt"] + text)["input_ids"] + [tokenizer.eos_token_id]
        for problem, text in zip(problems, texts, strict=True)
    ]
    tokens = torch.nn.utils.rnn.pad_sequence(
        list(map(torch.tensor, rows)), batch_first=True, padding_value=tokenizer.pad_token_id
    )
    starts = torch.tensor([len(tokenizer(problem["prompt"])["input_ids"]) for problem in problems]).unsqueeze(1)
    ends = torch.tensor(list(map(len, rows))).unsqueeze(1)
    places = torch.arange(tokens.shape[1])
    return tokens, (places >= starts) & (places < ends)


def distill(model, scheme: str, group_size: int, seed: int, bf16: bool, precisions: list[int] | None = None) -> None:
    """Distill the unquantized model in `NUM_DISTILLED` updates of 32 answers each, at `precisions` in turn
    (examples/warm_start.py)."""
    steps = chain_sums.chain_steps(model)
    config = DistillationConfig(
        tempfile.mkdtemp(),
        seed=seed,
        max_steps=NUM_DISTILLED,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        per_device_train_batch_size=32,
        max_completion_length=chain_sums.num_new_tokens(steps),
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=bf16,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    prompts = Dataset.from_list([{"prompt": problem["prompt"]} for problem in chain_sums.make_problems(steps)[0]])
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    teacher, scheme = copy.deepcopy(model), get_scheme(scheme, group_size=group_size)
    warm_start(model, teacher, scheme, prompts, tokenizer, config, precisions)


def measure_divergence(trainer, schemes: dict[str, dict], problems: list[dict[str, str]]) -> dict[str, float]:
    """Return KL(unquantized || low-bit) by scheme, in nats per token sampled from the unquantized model."""
    tokens, mask = sample_answers(trainer, problems)
    bf16 = trainer.args.bf16
    found = divergence.divergences(
        trainer.model,
        tokens,
        mask,
        [get_scheme(**options) for options in schemes.values()],
        torch.bfloat16 if bf16 else torch.float32,
        bf16,
    )
    return dict(zip(schemes, found, strict=True))


@torch.no_grad()
def round_by_gptq(trainer, tokens: torch.Tensor, damping: float = 0.01) -> None:
    """
    Round by GPTQ (https://arxiv.org/abs/2210.17323): compensate the error of each rounded column in the others,
    weighted by the second moments of the inputs. The inputs come from the unquantized model.
    """
    model = trainer.model
    layers = quantized_layers(model)
    signed = {layer.scheme.name for layer in layers.values() if layer.scheme.grid.has_signed_scales}
    if signed:
        raise ValueError(
            f"The start from GPTQ places masters such that their scale is the largest magnitude over half the range, which is not "
            f"the rule of {sorted(signed)}. Choose a scheme that ends in '-observer', or another start."
        )
    moments = {name: torch.zeros(layer.in_features, layer.in_features) for name, layer in layers.items()}

    def add(name):
        def hook(module, inputs, output):
            rows = inputs[0].float().flatten(0, -2)
            moments[name] += rows.T @ rows

        return hook

    disable_quantized_forward(model)
    hooks = [layer.register_forward_hook(add(name)) for name, layer in layers.items()]
    for ids in tokens.split(BATCH_SIZE):
        divergence.log_probs(model, ids, trainer.args.bf16)
    for hook in hooks:
        hook.remove()
    for name, layer in layers.items():
        layer.use_quantized_forward = True
        moment = moments[name]
        moment.diagonal().add_(damping * moment.diagonal().mean())
        factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(moment)), upper=True)
        weight, rounded = layer.weight.clone(), torch.empty_like(layer.weight)
        size = layer.scheme.group_size_for(weight.shape[1]) or weight.shape[1]
        for column in range(weight.shape[1]):
            if column % size == 0:
                scale = weight[:, column : column + size].abs().amax(1) / layer.scheme.grid.scale_divisor
                scale = scale.to(layer.scale_dtype).float()
            codes = (weight[:, column] / scale).round().clamp(*layer.scheme.grid.quant_range)
            # A master at the edge of the range keeps its code and the scale of its group.
            edge = layer.scheme.grid.scale_divisor
            rounded[:, column] = (
                torch.where(codes == layer.scheme.grid.quant_range[1], edge, codes.clamp(-edge, edge)) * scale
            )
            error = (weight[:, column] - codes * scale) / factor[column, column]
            weight[:, column + 1 :] -= error.unsqueeze(1) * factor[column, column + 1 :]
        layer.weight.copy_(rounded)


def _low_bit(layer, weight: torch.Tensor) -> torch.Tensor:
    return LowBitTensor.from_hp(weight.contiguous(), layer.scheme, layer.scale_dtype).dequantize()
