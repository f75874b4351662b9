"""
Bases of [`~trl_qarl.qarl_trainer.QaRLTrainer`] in the order in which Python looks methods up, and what each adds:

| base | adds |
|---|---|
| [`~trl_qarl.saves.SavesRuns`] | checkpoints from which a run continues as if it had not ended |
| [`TakesTurns`] | bits of the policy, batch by batch |
| [`~trl_qarl.log_probs.ScoresRollouts`] | the learner's log-probs of a rollout |
| `trl.GRPOTrainer` | rollouts, rewards, advantages, losses |
| [`PreparesPolicy`] | the low-bit policy |
| `trl.trainer.base_trainer._BaseTrainer`, `transformers.Trainer` | the loop, the optimizer, files |

The first three extend methods of TRL's trainer, none the same as another. [`PreparesPolicy`] stands behind it: TRL's
constructor makes the model, calls `PreparesPolicy.__init__`, which calls transformers' (the model moves to its device)
and prepares the policy, and then builds a reference model and an engine from it.
"""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback
from trl.trainer import grpo_trainer
from trl.trainer.base_trainer import _BaseTrainer
from typing_extensions import override

from .checks.launch import check_agreement, check_launch
from .numerics.attach import keep_no_products
from .policy import Policy
from .quantization.inventory import Inventory
from .quantization.precisions import precision_at
from .quantization.swap import SwapReport
from .rollout.failures import all_or_none
from .sharding.accelerate import shard_when_prepared, sharded_by


__all__ = ["PreparesPolicy", "RefreshReference", "TakesTurns", "replaced_in_trl"]


class PreparesPolicy(_BaseTrainer):
    """
    Prepares `policy` where TRL's trainers call transformers' constructor. Inherit from it after TRL's trainer, so that
    it comes between the two.
    """

    policy: Policy

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        check_launch(self.accelerator, self.args, self.model)
        with all_or_none(self.accelerator):
            self.policy.prepare(self.model, sharded_by(self.accelerator))
        check_agreement(self.accelerator, self.policy.record() | {"precisions": self.args.precisions})
        if self.is_fsdp_enabled:
            shard_when_prepared(self.accelerator, keep_no_products)

    @property
    def swap_report(self) -> SwapReport:
        return self.policy.swap_report

    @property
    def numerics(self) -> str:
        return self.policy.numerics


class RefreshReference(TrainerCallback):
    """Invalidates the low-bit weights of the reference: TRL writes to its `.data`, which layers cannot notice if the
    optimizer's step was skipped."""

    def __init__(self, ref_model):
        self.ref_model = ref_model

    @override
    def on_step_end(self, args, state, control, **kwargs):
        for layer in Inventory.of(self.ref_model).layers.values():
            layer.invalidate()


class TakesTurns(_BaseTrainer):
    """
    Generates, scores and learns each generation batch at one precision, as `precisions` says. Inherit from it before
    TRL's trainer.

    The precision follows from the update with which the batch began, so that a resumed run continues unchanged.
    """

    args: Any
    policy: Policy
    use_vllm: bool
    _step: int
    _last_loaded_step: int

    def set_precision(self, precision: int | dict[str, int] | None) -> None:
        """Have the policy run at [`Policy.set_precision`], and the engine with it from its next rollout on."""
        if self.policy.set_precision(precision) and self.use_vllm:
            self._last_loaded_step = -1

    @override
    def training_step(self, *args, **kwargs):
        """Sets the precision of the generation batch that is in progress, or begins."""
        options = self.args
        if options.precisions is not None:
            num_updates = options.steps_per_generation * options.num_iterations // options.gradient_accumulation_steps
            num_done = self._step // options.gradient_accumulation_steps % num_updates
            self.set_precision(precision_at(options.precisions, self.state.global_step - num_done, num_updates))
        return super().training_step(*args, **kwargs)

    @override
    def evaluate(self, *args, **kwargs):
        """Evaluates what is deployed: at the bits of the scheme."""
        self.set_precision(None)
        return super().evaluate(*args, **kwargs)

    @override
    def train(self, *args, **kwargs):
        """Leaves the policy at the bits of its scheme."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self.set_precision(None)


@contextmanager
def replaced_in_trl(**factories: Callable[..., Any]):
    """
    While open, [`~trl.GRPOTrainer`] calls `factories` under the names of its module: what loads models, and what its
    rollouts are made with. It has no other point of injection.
    """
    originals = {name: getattr(grpo_trainer, name) for name in factories}
    vars(grpo_trainer).update(factories)
    try:
        yield
    finally:
        vars(grpo_trainer).update(originals)
