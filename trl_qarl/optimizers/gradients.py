"""Gradients in 16 bits: half the memory of those in the masters' float32, rounded once for each micro-batch."""

import torch
from accelerate import Accelerator
from torch import nn

from ..quantization.storage import keep_gradients_in, storage_of


def round_gradients(accelerator: Accelerator, model: nn.Module) -> None:
    """
    Have `model` keep the gradients of its parameters in bfloat16. Layers compute them as before, and processes that
    share masters add them up in float32; several micro-batches are added up in bfloat16.

    `max_grad_norm` limits the norm of the rounded gradients, added up in float32: torch would round the norm of each
    tensor, and the total, to bfloat16.
    """
    keep_gradients_in(model, torch.bfloat16)

    @torch.no_grad()
    def clip_grad_norm_(parameters, max_norm, norm_type=2):
        gradients, squares = [], []
        for grad in (p.grad for p in parameters if p.grad is not None):
            storage = storage_of(grad)
            gradients.append(storage.local(grad))
            square = torch.linalg.vector_norm(gradients[-1], dtype=torch.float32).square()
            squares.append(square / storage.num_copies(grad))
        total = torch.stack(squares).sum().to(accelerator.device)
        if accelerator.num_processes > 1:
            total = accelerator.reduce(total, reduction="sum")
        norm = total.sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))
        return norm

    # transformers calls it before every update, with the norm of two.
    accelerator.clip_grad_norm_ = clip_grad_norm_  # pyrefly: ignore[bad-assignment]
