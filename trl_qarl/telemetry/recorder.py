"""[`Recorder`]: collects the measurements of a run, which the trainer triggers and a callback writes."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from typing_extensions import override

from ..forward import Batch
from ..objectives.objective import reduce_metrics
from ..objectives.tbpo import mismatch_weight
from ..quantization.inventory import Inventory
from ..quantization.storage import is_sharded
from ..quantization.weight import QuantizedWeight
from .codes import code_flip_rate, sampled_masters, sqnr, update_to_step
from .mismatch import mismatch_metrics, mismatch_sums, weight_metrics
from .text import completion_text, has_loop, is_garbled


# In a run with several precisions these are also logged separately for each.
_BY_BITS = ("reward", "mismatch/abs_logp_mean", "quant/sqnr")


class Recorder(TrainerCallback):
    """
    Counters and timers of one run.

    Measurements go into `metrics`, lists of values by name for `"train"` and `"eval"`, which TRL averages and logs.
    `accelerator` adds up over the processes, all of which have to call.
    """

    def __init__(self, args, accelerator, model: nn.Module, metrics: Mapping[str, dict[str, list[float]]]):
        self.args, self.accelerator, self.model = args, accelerator, model
        self._metrics = metrics
        self._precision: str | None = None
        self._seconds: dict[str, float] = defaultdict(float)
        self._seconds_inside = 0.0
        self._step_start = 0.0
        self._masters: dict[str, torch.Tensor] = {}

    def log(self, values: Mapping[str, float]) -> None:
        """Add values to the metrics of training, or of evaluation while the model is in that mode."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, value in values.items():
            metrics[name].append(value)

    def reduce(self, metrics: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return one number for each metric of sequences, over all processes."""
        return reduce_metrics({name: self.accelerator.gather(values) for name, values in metrics.items()})

    def masked_mean(self, values: torch.Tensor, mask: torch.Tensor) -> float:
        """Return the mean of `values` where `mask` is 1, over all processes."""
        totals = self.accelerator.reduce(torch.stack([(values.detach() * mask).sum(), mask.sum().float()]))
        return (totals[0] / totals[1].clamp(min=1.0)).item()

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        """Add the seconds until the context closes to those of `part`, without those of parts timed inside it."""
        start, outside, self._seconds_inside = time.perf_counter(), self._seconds_inside, 0.0
        try:
            yield
            self._seconds[part] += time.perf_counter() - start - self._seconds_inside
        finally:
            self._seconds_inside = outside + time.perf_counter() - start

    def pop_seconds(self, part: str) -> float:
        """Return the seconds of `part` since the last call."""
        return self._seconds.pop(part, 0.0)

    def synchronize(self) -> None:
        """Wait for the accelerator; otherwise its time would be added to the next part that waits for it."""
        if self.accelerator.device.type != "cpu":
            torch.accelerator.synchronize(self.accelerator.device)

    def observe_turn(self, completion_ids: Sequence[Sequence[int]], seconds: float) -> None:
        """Measure completions that took the engine `seconds`; 0 if only another process knows the time."""
        num_tokens = sum(len(ids) for ids in completion_ids)
        self.log(
            {
                "rollout/seconds": seconds,
                "rollout/tokens_per_second": num_tokens / seconds if seconds else 0.0,
                "rollout/mean_length": num_tokens / max(len(completion_ids), 1),
            }
        )

    def observe_completions(self, completion_ids: Sequence[Sequence[int]], completions: Sequence[Any]) -> None:
        """Count the completions that loop or are garbled."""
        loops = sum(has_loop(ids) for ids in completion_ids)
        garbled = sum(is_garbled(completion_text(completion)) for completion in completions)
        sums = torch.tensor([len(completions), loops, garbled], device=self.accelerator.device)
        total, loops, garbled = self.accelerator.reduce(sums, reduction="sum").tolist()
        shares = {"repetition": loops / max(total, 1), "garbled": garbled / max(total, 1)}
        self.log({f"rollout/{name}_share": share for name, share in shares.items()})

    def observe_rollout(self, publication: Mapping[str, float]) -> None:
        """Measure the quantization error of a generation batch, and log the measurements of its publication."""
        row = {**sqnr(Inventory.of(self.model).weights(), self._add_up), **publication}
        self.log(row)
        bits = row.get("quant/bits")
        self._precision = None if bits is None else f"{bits:.0f}_bits"
        if self.model.training:
            self._log_by_bits({"reward": self._metrics["train"]["reward"][-1], **row})

    def observe_mismatch(self, output: dict[str, Any], batch: Batch) -> None:
        """Measure the mismatch of a generation batch without reading the model's weights. `output` is TRL's batch,
        `batch` its log-probs, advantages and mask."""
        mismatch = self._compare(*batch.rollout, batch.advantages)
        ratio = output.get("importance_sampling_ratio")
        if ratio is not None and self.args.vllm_importance_sampling_mode.endswith("mask"):
            counts = batch.mask.bool() if ratio.shape == batch.mask.shape else torch.ones_like(ratio)
            mismatch["mismatch/rejected_share"] = self.masked_mean((ratio == 0).float(), counts)
        self.log(mismatch)
        if self.model.training:
            self._log_by_bits(mismatch)

    def observe_staleness(self, now: torch.Tensor, batch: Batch) -> None:
        """Measure the distance of the learner from the weights that drew a batch. `now`, `(B, T)`, are the learner's
        log-probs when it begins with `batch`, whose old log-probs are those of the weights that drew it."""
        measured = self._compare(now, batch.old_per_token_logps, batch.mask)
        for name in ("mismatch/unknown_tokens", "mismatch/k1"):
            measured.pop(name, None)
        self.log({name.replace("mismatch/", "staleness/"): value for name, value in measured.items()})

    def _log_by_bits(self, values: Mapping[str, float]) -> None:
        if self._precision is not None:
            # Logged separately, because a row of the log is a mean over batches.
            self.log({f"{name}/{self._precision}": values[name] for name in _BY_BITS if name in values})

    def _compare(
        self, ours: torch.Tensor, theirs: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor | None = None
    ) -> dict[str, float]:
        """Return the measurements of log-probs `(B, T)` over all processes, with `advantages` also by parts."""
        sums, counts, maxima = mismatch_sums(ours, theirs, mask, advantages)
        weights = self.accelerator.gather(mismatch_weight(ours, theirs, mask, self.args.mismatch_cap))
        sums, counts = (self.accelerator.reduce(each, reduction="sum") for each in (sums, counts))
        maxima = self.accelerator.gather(maxima).view(-1, len(maxima)).amax(0)
        advantages = None if advantages is None else self.accelerator.gather(advantages)
        metrics = mismatch_metrics(sums, counts, maxima)
        return metrics | weight_metrics(weights, advantages) if sums[0, -1] else metrics

    @contextmanager
    def steps_within(self, engine: Any) -> Iterator[None]:
        """Measure the steps of DeepSpeed's `engine`, which happen within backward, before callbacks are called."""
        step = engine.step

        def measured_step(*args, **kwargs):
            self.synchronize()
            with self.time("step"):
                self._masters = sampled_masters(self._trained_layers())
                step(*args, **kwargs)
                self.synchronize()

        engine.step = measured_step
        try:
            yield
        finally:
            del engine.step

    @override
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._step_start = time.perf_counter()
        if not self._masters:
            self._masters = sampled_masters(self._trained_layers())

    @override
    def on_optimizer_step(self, args, state, control, **kwargs):
        """Quantize the masters and measure how many codes changed."""
        rate = code_flip_rate((layer for _, layer in self._trained_layers()), self._add_up)
        self.synchronize()
        self.log({"step/optimizer_seconds": self.pop_seconds("step") + time.perf_counter() - self._step_start})
        masters, self._masters = self._masters, {}
        if not masters:
            return
        step = update_to_step(masters, self._trained_layers(), self._add_up)
        self.log({"quant/code_flip_rate": rate, "quant/update_to_step": step})

    def _add_up(self, sums: list[float]) -> list[float]:
        if not is_sharded(self.model):
            # Every process has measured the same.
            return sums
        return self.accelerator.reduce(
            torch.tensor(sums, dtype=torch.float64, device=self.accelerator.device), reduction="sum"
        ).tolist()

    def _trained_layers(self) -> Iterator[tuple[str, QuantizedWeight]]:
        # With an adapter the base does not change.
        return ((name, layer) for name, layer in Inventory.of(self.model).weights() if layer.is_trained)
