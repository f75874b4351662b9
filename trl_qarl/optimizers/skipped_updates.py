"""Updates without a gradient, in which no optimizer moves or decays a weight."""

import logging
from collections.abc import Callable, Mapping
from weakref import WeakSet

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from transformers import TrainerCallback
from typing_extensions import override

from ..quantization.storage import storage_of


logger = logging.getLogger(__name__)


class SkipsUpdates(TrainerCallback):
    """
    Skips the optimizer's step, with its decay and its state, if all gradients of all processes are exactly zero: every
    completion of the update was masked, outside its trust band, or without an advantage. Muon and AdamW would go on in
    the direction of their momentum, which for Muon has the length of an ordinary update.

    Optimizers of torch leave out parameters whose gradient is `None`. A hook of the optimizer removes the gradients,
    after clipping and callbacks. DeepSpeed calls it inside backward, with its slices of one group of parameters.

    As transformers does for gradients that overflow, a skipped update counts as one, and the schedule of the learning
    rate does not advance.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            The trainer's, whose processes decide together.
        log (`Callable`):
            Receives the metric `step/skipped` of each update.
    """

    def __init__(self, accelerator: Accelerator, log: Callable[[Mapping[str, float]], None]):
        self._accelerator, self._log = accelerator, log
        self._watched: WeakSet[torch.optim.Optimizer] = WeakSet()
        # One entry for each call of the hook in this update. `None` outside: before torch loads the state of a sharded
        # optimizer, it initializes the state by a step with gradients of zero.
        self._were_zero: list[bool] | None = None
        self._has_warned = False
        self._num_updates = self._num_skipped = 0

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Skip the steps of `optimizer`; a second call for the same one does nothing."""
        # accelerate wraps it for training.
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if isinstance(optimizer, torch.optim.Optimizer) and optimizer not in self._watched:
            optimizer.register_step_pre_hook(self._drop_zeros)
            self._watched.add(optimizer)

    def _drop_zeros(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        if self._were_zero is None:
            return
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        # NaN is not zero.
        has_value = any(storage_of(p.grad).local(p.grad).any() for p in trained if p.grad is not None)
        if self._accelerator.num_processes > 1:
            flag = torch.tensor(float(has_value), device=self._accelerator.device)
            has_value = self._accelerator.reduce(flag, reduction="sum").item() > 0
        self._were_zero.append(not has_value)
        if not has_value:
            for p in trained:
                p.grad = None

    @property
    def _is_skipped(self) -> bool:
        return bool(self._were_zero) and all(self._were_zero)

    @override
    def on_train_begin(self, args, state, control, **kwargs):
        self._num_updates = self._num_skipped = 0

    @override
    def on_train_end(self, args, state, control, **kwargs):
        if 0 < self._num_skipped == self._num_updates and self._accelerator.is_main_process:
            logger.warning(
                "This training has changed no weight: none of its %d updates had a gradient. Look at `reward_std` and at "
                "`completions/clipped_ratio`, and give rewards that differ between completions of a prompt.",
                self._num_updates,
            )

    @override
    def on_step_begin(self, args, state, control, **kwargs):
        self._were_zero = []

    @override
    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        if self._is_skipped:
            _mark_overflow(optimizer, True)

    @override
    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        is_skipped, self._were_zero = self._is_skipped, None
        if is_skipped:
            _mark_overflow(optimizer, False)
        self._num_updates, self._num_skipped = self._num_updates + 1, self._num_skipped + is_skipped
        self._log({"step/skipped": float(is_skipped)})
        if is_skipped and not self._has_warned and self._accelerator.is_main_process:
            self._has_warned = True
            logger.warning(
                "Update %d has no gradient: every completion was masked, outside its trust band, or without an advantage. The optimizer's "
                "step and its weight decay are skipped. The metric step/skipped has the share of such updates; this is logged only once.",
                state.global_step,
            )


def _mark_overflow(optimizer: AcceleratedOptimizer, is_marked: bool) -> None:
    """Set the flag that the trainer reads before it advances the schedule; accelerate keeps it, or DeepSpeed."""
    if hasattr(optimizer.optimizer, "overflow"):
        optimizer.optimizer.overflow = is_marked
    else:
        optimizer._is_overflow = is_marked
