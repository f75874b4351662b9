"""KL divergence of a model with low-bit weights from the unquantized model, in nats per token of sampled answers."""

from collections.abc import Iterable, Iterator

import torch
from torch.nn import functional as F

from trl_qarl import QuantScheme, prepare_model, restore_model


def log_probs(model, ids: torch.Tensor, bf16: bool = False) -> torch.Tensor:
    """Return the log-probs of all next tokens, `(B, T - 1, V)`."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return logits.float().log_softmax(-1)


def divergence(teacher: torch.Tensor, student: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return KL(teacher || student) in nats per token of `mask`, `(B, T)`, from log-probs `(B, T - 1, V)`."""
    each = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    return each[mask[:, 1:]].mean()


@torch.no_grad()
def divergences(
    model,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    schemes: Iterable[QuantScheme],
    scale_dtype: torch.dtype,
    bf16: bool = False,
) -> Iterator[float]:
    """Yield KL(unquantized || low-bit) for each of `schemes`, over the `tokens` in `mask`, both `(B, T)`."""
    unquantized = log_probs(model, tokens, bf16)
    for scheme in schemes:
        prepare_model(model, scheme, scale_dtype=scale_dtype)
        yield divergence(unquantized, log_probs(model, tokens, bf16), mask).item()
        restore_model(model)
