"""
Bases of [`~trl_qarl.trainer.qarl_trainer.QaRLTrainer`], which Python searches for methods in this order:
[`~trl_qarl.trainer.saves.SavesRuns`] (checkpoints), [`ScoresRollouts`] (the learner's log-probs of a rollout),
`trl.GRPOTrainer`, [`PreparesPolicy`] (the low-bit policy), TRL's `_BaseTrainer` and `transformers.Trainer`.

The first two extend methods of TRL's trainer, each of them different ones. [`PreparesPolicy`] comes after it: TRL's
constructor creates the model and calls `PreparesPolicy.__init__`. That calls transformers' constructor, which moves
the model to its device, and prepares the policy. TRL then builds a reference model and an engine from it.
"""

from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from transformers import TrainerCallback
from trl.trainer import grpo_trainer
from trl.trainer.base_trainer import _BaseTrainer
from typing_extensions import override

from ..bitwise.attach import keep_no_products
from ..checks.launch import check_agreement, check_launch
from ..forward import FORWARD_KEYS, Batch, padded_logps, scoring_forward, shuffle_groups
from ..objectives.objective import Objective
from ..optimizers.gradients import round_gradients
from ..quantization.inventory import Inventory
from ..quantization.versions import KeptVersion, at_version
from ..replacing import replaced
from ..rollout.ahead import Pending, Prefetcher
from ..rollout.failures import all_or_none
from ..sharding import sharded_by
from ..sharding.fsdp2 import choose_units, shard_when_prepared
from ..telemetry.recorder import Recorder
from .policy import Policy


class PreparesPolicy(_BaseTrainer):
    """Prepares `policy` when TRL's trainer calls transformers' constructor."""

    policy: Policy

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        check_launch(self.accelerator, self.args, self.model)
        with all_or_none(self.accelerator):
            self.policy.prepare(self.model, sharded_by(self.accelerator))
        self.swap_report, self.numerics = self.policy.swap_report, self.policy.numerics
        check_agreement(self.accelerator, self.policy.record() | {"precisions": self.args.precisions})
        if self.is_fsdp_enabled:
            choose_units(self.accelerator.state.fsdp_plugin, self.model)
            shard_when_prepared(self.accelerator, self._prepare_sharded)
        elif self.args.gradient_dtype == "bfloat16":
            round_gradients(self.accelerator, self.model)

    def _prepare_sharded(self, model) -> None:
        keep_no_products(model)
        if self.args.gradient_dtype == "bfloat16" and any(p.requires_grad for p in model.parameters()):
            round_gradients(self.accelerator, model)


class RefreshReference(TrainerCallback):
    """Invalidates the low-bit weights of the reference: TRL writes to `.data`, which its layers cannot detect if the
    optimizer's step was skipped."""

    def __init__(self, ref_model):
        self.ref_model = ref_model

    @override
    def on_step_end(self, args, state, control, **kwargs):
        for layer in Inventory.of(self.ref_model).layers.values():
            layer.invalidate()


@dataclass(frozen=True)
class ScoringPlan:
    """
    Decision about the old log-probs of one generation batch, made when the batch arrives.

    Args:
        source (`str`):
            Whose log-probs the old ones are: the `"learner"`'s, with the weights that drew the batch, or the
            `"sampler"`'s, if both give every token the same bits and scoring the rollout would return the same values.
            If the learner has scored all tokens, all are compared with the sampler's, else those of the first update,
            whose forward runs anyway, and of one more sequence.
        version (`int`):
            The update whose weights drew the batch.
        weights ([`~trl_qarl.quantization.versions.KeptVersion`], *optional*):
            These weights, if the batch was drawn before its turn. By default the learner has them when the batch
            arrives.
    """

    source: Literal["learner", "sampler"]
    version: int
    weights: KeptVersion | None = field(default=None, repr=False)

    @property
    def is_stale(self) -> bool:
        """True if the learner has other weights than those that drew the batch."""
        return self.weights is not None

    def at_drawn(self, model: nn.Module) -> AbstractContextManager:
        """While open, `model` has the weights that drew the batch."""
        return nullcontext() if self.weights is None else at_version(model, self.weights)


class ScoresRollouts(grpo_trainer.GRPOTrainer):
    """
    Gives a generation batch the learner's log-probs, from a scoring forward or from the sampler, and compares the two.

    With engine numerics learner and sampler give every token the same bits, so a forward that scores a rollout would
    compute known values. The sampler's log-probs are used instead, and compared with forwards that run anyway: those
    of the first update, whose weights are still the rollout's. In addition each process scores one sequence from the
    rest of the batch only for the comparison.

    A batch that was drawn ahead was sampled with earlier weights. These weights are kept and used for scoring. No
    update runs with them, so each process scores one micro-batch only for the comparison.
    """

    policy: Policy
    recorder: Recorder
    _objective: Objective | None
    _ahead: Prefetcher | None = None
    # Plan of the generation batch in progress, until its last measurement.
    _plan: ScoringPlan | None = None
    # Sequences that the loss in progress computes, and the log-probs of the others.
    _chosen: tuple[torch.Tensor, torch.Tensor] | None = None
    # The sampler's log-probs of a rollout that TRL is about to score.
    _unscored: list[list[float | None]] | None = None

    def _plan_scoring(self, drawn: Pending | None = None) -> ScoringPlan:
        """Decide about a batch that is drawn now, or was `drawn` before its turn."""
        is_exact = self.policy.numerics == "engine" and not self.policy.exactness.has_differed
        version, weights = (self.state.global_step, None) if drawn is None else (drawn.version, drawn.weights)
        return ScoringPlan("sampler" if is_exact and self.rollout_func is None else "learner", version, weights)

    def _keep_sampled(self, logps: list[list[float | None]] | None) -> None:
        """Keep the sampler's log-probs of a rollout, if TRL is about to score it."""
        args = self.args
        is_misaligned = args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations) != 0
        is_scored_by_trl = is_misaligned or (self.use_vllm and args.vllm_importance_sampling_correction)
        self._unscored = logps if is_scored_by_trl else None

    def _fill_old_logps(self, output: dict[str, Any], plan: ScoringPlan) -> None:
        """Fill in the old log-probs of a generation batch if TRL has not."""
        if "sampling_per_token_logps" not in output:
            raise ValueError(
                "`rollout_func` returned `logprobs=None`, so the mismatch between rollout and learner is unknown. "
                "Return the log-prob of every sampled token."
            )
        if plan.source == "sampler":
            output["old_per_token_logps"] = output["sampling_per_token_logps"]
        elif "old_per_token_logps" not in output:
            output["old_per_token_logps"] = self._score_drawn(output, plan)

    def _measure_mismatch(self, output: dict[str, Any], plan: ScoringPlan) -> None:
        """Measure the mismatch of a generation batch with the weights that drew it, and check that it is exact."""
        batch = Batch.of(output)
        self.recorder.observe_mismatch(output, batch)
        if self.policy.numerics != "engine":
            return
        llm = self.vllm_generation.llm if self.args.is_colocated else None
        # Only the main process can ask a server; tokens of other processes are reported without the engine's answer.
        asks = self.use_vllm and self.accelerator.is_main_process and not plan.is_stale
        score = self.vllm_generation.engine.score if asks else None
        self.policy.exactness.check(output, batch, self.model, self.accelerator, llm, score)

    @property
    def _keeps_groups(self) -> bool:
        args = self.args
        size = args.per_device_train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes
        return size >= 2 * self.num_generations if args.keep_groups is None else args.keep_groups

    @override
    def _prepare_inputs(self, generation_batch):
        """Keeps the completions of a prompt together, and scores the parts of a new generation batch that are compared
        and not used by the first update."""
        earlier = self._plan
        first = self.accelerator.process_index * self.args.per_device_train_batch_size * self.args.steps_per_generation
        shuffle = partial(shuffle_groups, size=self.num_generations, first=first)
        with replaced(grpo_trainer, shuffle_sequence_dict=shuffle) if self._keeps_groups else nullcontext():
            inputs = super()._prepare_inputs(generation_batch)
        plan = self._plan
        if self.model.training and plan is not None and plan is not earlier and plan.source == "sampler":
            self._score_compared(plan)
        return inputs

    def _score_compared(self, plan: ScoringPlan) -> None:
        """Score one sequence that the first update does not use, and one micro-batch of a batch drawn ahead."""
        parts, accumulation = self._buffered_inputs, self.args.gradient_accumulation_steps
        with self.recorder.time("scoring"):
            if plan.is_stale:
                parts[0]["old_per_token_logps"] = self._score_drawn(parts[0], plan)
            num_in_first = 1 if plan.is_stale else accumulation - self._step % accumulation
            if num_in_first < len(parts):
                # The batch was shuffled with torch's generator: the choice is random, and the same when resumed.
                first = {name: value[:1] for name, value in parts[-1].items() if value is not None and value.ndim}
                rest = parts[-1]["old_per_token_logps"][1:]
                parts[-1]["old_per_token_logps"] = torch.cat([self._score_drawn(first, plan), rest])
        if plan.is_stale:
            self._observe_parts(parts, plan)

    def _measure(self, inputs: dict[str, Any], per_token_logps: torch.Tensor) -> None:
        """Make the measurements that are left when the loss has computed `per_token_logps`: the age of a batch drawn
        ahead in the first forward, or the comparison in those of the first update, before the weights change."""
        plan, is_training = self._plan, self.model.training
        if plan is None:
            return
        if plan.is_stale:
            self.recorder.observe_staleness(per_token_logps.detach(), Batch.of(inputs))
        elif plan.source == "sampler":
            inputs["old_per_token_logps"] = per_token_logps.detach()
            parts = self._buffered_inputs if is_training else [inputs]
            if not self.accelerator.sync_gradients and is_training and inputs is not parts[-1]:
                return
            self._observe_parts(parts, plan)
        self._plan = None

    def _observe_parts(self, parts: list[dict[str, Any]], plan: ScoringPlan) -> None:
        with self.recorder.time("scoring"):
            names = [name for name, value in parts[0].items() if value is not None and value.ndim]
            self._measure_mismatch({name: torch.cat([part[name] for part in parts]) for name in names}, plan)
        self.recorder.log({"step/scoring_seconds": self.recorder.pop_seconds("scoring")})

    @torch.no_grad()
    def _score_rollout(self, inputs: dict[str, Any]) -> torch.Tensor:
        is_training, args = self.model.training, self.args
        batch_size = args.per_device_train_batch_size if is_training else args.per_device_eval_batch_size
        return self._score(self.model, inputs, batch_size=batch_size)[0]

    def _score_drawn(self, inputs: dict[str, Any], plan: ScoringPlan) -> torch.Tensor:
        """Return the log-probs of a rollout under the weights that drew it."""
        with plan.at_drawn(self.model):
            return self._score_rollout(inputs)

    @contextmanager
    def _choosing(self, inputs: dict[str, Any]):
        """While open, the loss of `inputs` computes only sequences that have a gradient, and one of those that have
        none, whose log-probs are still compared. Others keep their log-probs at rollout, and get the mean entropy."""
        skips = self._objective is None or self._objective.skips_zero_advantages
        needs_all = self.beta != 0.0 or self.aux_loss_enabled or self._entropy_bonus_enabled
        # The first forward of a stale batch measures its age.
        needs_all |= self.top_entropy_quantile < 1.0 or (self._plan is not None and self._plan.is_stale)
        if self.model.training and self.policy.takes_layouts and skips and not needs_all:
            known = inputs["old_per_token_logps"]
            chosen = (inputs["advantages"] != 0) | known.isnan().any(dim=1)
            if not chosen.all():
                chosen[chosen.logical_not().nonzero()[0]] = True
                self._chosen = chosen, known
        try:
            yield
        finally:
            self._chosen = None

    def _score(self, model, inputs: dict[str, Any], **kwargs):
        """Per-token log-probs `(B, T)`, entropies and auxiliary loss of the completions in `inputs`."""
        forward_kwargs = {key: inputs.get(key) for key in FORWARD_KEYS}
        return self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            **forward_kwargs,
            **kwargs,
        )

    @override
    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        """Uses [`~trl_qarl.forward.scoring_forward`], or the sampler's log-probs, and keeps them for measurements."""
        weights = nullcontext()
        # TRL scores a rollout without entropies, the policy before its reference; every loss asks for entropies.
        if self._unscored is not None and not kwargs.get("compute_entropy"):
            sampled, self._unscored = self._unscored, None
            if self._plan.source == "sampler":
                return padded_logps(sampled, logits_to_keep).to(input_ids.device), None, None
            weights = self._plan.at_drawn(self.model)
        chosen, known = self._chosen or (None, None)
        unwrapped, max_tokens = self.accelerator.unwrap_model(model), self.args.max_tokens_per_forward
        policy = self.policy
        forward = scoring_forward(model, unwrapped, policy.takes_layouts, chosen, max_tokens, policy.pad_batches)
        with weights:
            logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(
                forward, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        if chosen is not None:
            mask = attention_mask[:, -logits_to_keep:] * chosen[:, None]
            logps = torch.where(chosen[:, None], logps, known)
            mean = (entropies.detach() * mask).sum() / mask.sum().clamp(min=1)
            entropies = torch.where(chosen[:, None], entropies, mean)
        self._forward_logps = logps.detach()
        return logps, entropies, aux_loss
