"""Learners with engine numerics, sequences, and their log-probs from batches of several forms."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from testing_utils import MIXTURES, make_tiny_mixture, make_tiny_model
from trl_qarl import get_scheme, prepare_model
from trl_qarl.adapters.base import prepare_base
from trl_qarl.bitwise import cpu as kernels
from trl_qarl.bitwise.ops import backend_of, token_log_probs
from trl_qarl.forward import scoring_forward
from trl_qarl.token_row import Segments


REASON = kernels.reason_against()
VLLM = [pytest.mark.vllm, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


def needs_vllm(test):
    for mark in VLLM:
        test = mark(test)
    return test


LENGTHS = (3, 40, 17, 130, 1, 64, 9)


def make_model(tmp_path, arch="qwen3", scheme="bf16", **overrides):
    path = (make_tiny_mixture if arch in MIXTURES else make_tiny_model)(tmp_path, arch, **overrides)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prepare_model(model, scheme, scale_dtype=torch.bfloat16)
    return model


def make_sequences(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, 260, (length,), generator=generator).tolist() for length in lengths]


def padded_log_probs(model, sequences, side):
    """Log-probs of each sequence's tokens after its first, from one padded batch."""
    length = max(map(len, sequences))

    def pad(row, value):
        padding = [value] * (length - len(row))
        return padding + row if side == "left" else row + padding

    ids = torch.tensor([pad(row, 0) for row in sequences])
    mask = torch.tensor([pad([1] * len(row), 0) for row in sequences])
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    starts = [length - len(row) if side == "left" else 0 for row in sequences]
    return [
        token_log_probs(logits[i, start : start + len(row) - 1], torch.tensor(row[1:], dtype=torch.int64))
        for i, (row, start) in enumerate(zip(sequences, starts, strict=True))
    ]


def packed_log_probs(model, sequences):
    """The same from all sequences in one row, told apart by their positions."""
    ids = torch.tensor([[token for row in sequences for token in row]])
    positions = torch.tensor([[position for row in sequences for position in range(len(row))]])
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0].split([*map(len, sequences)])
    return [
        token_log_probs(part[:-1], torch.tensor(row[1:], dtype=torch.int64))
        for part, row in zip(logits, sequences, strict=True)
    ]


def make_adapted(tmp_path, arch="qwen2", scheme="w4a16", is_merged=False, **config):
    """A `PeftModel` on a low-bit base, whose adapter is not zero."""
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, arch), dtype=torch.float32).eval()
    torch.manual_seed(0)
    options = {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": ["q_proj", "o_proj", "down_proj"],
        "init_lora_weights": False,
    }
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **(options | config))).eval()
    prepare_base(model, get_scheme(scheme), keep_masters=is_merged, is_merged=is_merged, scale_dtype=torch.bfloat16)
    return model


def make_batch(prompts, completions, times):
    """Ids, mask and labels of completions, `times` for each prompt, padded like TRL's batches."""
    prompts, completions = make_sequences(prompts), make_sequences(completions)
    rows = list(zip((prompt for prompt in prompts for _ in range(times)), completions, strict=True))
    width, length = max(map(len, prompts)), max(map(len, completions))
    ids, mask, labels = (torch.zeros(len(rows), width + length, dtype=torch.long) for _ in range(3))
    labels -= 100
    for row, (prompt, completion) in enumerate(rows):
        start, end = width - len(prompt), width + len(completion)
        ids[row, start:end], mask[row, start:end] = torch.tensor(prompt + completion), 1
        labels[row, width:end] = ids[row, width:end]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}, rows


def score(model, batch, takes_layouts, **options):
    """Output and gradients of a loss of log-probs, entropies and the auxiliary loss."""
    model.zero_grad()
    output = scoring_forward(model, model, takes_layouts)(**batch, fused_lm_head=True, **options)
    weights = torch.linspace(-1, 1, output.log_probs.numel()).view_as(output.log_probs)
    loss = (weights * output.log_probs).sum() + output.entropy.mean() + (output.aux_loss or 0.0)
    loss.backward()
    return output, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def make_attention(length, num_heads, num_key_heads, head_dim):
    """Attention of the positions `start` to `end` of one random sequence."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(length, heads, head_dim, generator=generator).bfloat16()
        for heads in (num_heads, num_key_heads, num_key_heads)
    )

    def attend(*ranges, window=None):
        """Attend in several ranges at once, each as a sequence of its own."""
        parts = [(query[start:end], key[:end], value[:end]) for start, end in ranges]
        lengths = [(end - start, end) for start, end in ranges]
        output = backend_of(query).attention(
            *map(torch.cat, zip(*parts, strict=True)), Segments(*zip(*lengths, strict=True)), 0.1, window
        )
        return output.split([queries for queries, _ in lengths])

    return attend
