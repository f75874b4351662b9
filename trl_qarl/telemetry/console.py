"""Console output of a training: one short row per logged step, and the advice of [`trl_qarl.telemetry.advisor`]."""

import logging
import math
import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_callback import CallbackHandler
from typing_extensions import override

from .advisor import STALLED_UPDATES, advise, assess


logger = logging.getLogger(__name__)

# Name on the console, metrics (the first one that was logged is shown), and format.
_COLUMNS = (
    ("reward", ("reward",), "{:.3g}"),
    ("bits", ("quant/bits",), "{:.3g}"),
    ("reward_std", ("reward_std",), "{:.2g}"),
    ("length", ("completions/mean_length", "rollout/mean_length"), "{:.0f}"),
    ("entropy", ("entropy",), "{:.2g}"),
    ("dropped", ("tbpo/dropped/total",), "{:.0%}"),
    ("clipped", ("clip_ratio/region_mean", "cispo_clip_ratio"), "{:.1%}"),
    ("mismatch", ("mismatch/abs_logp_mean",), "{:.1e}"),
    ("flips", ("quant/code_flip_rate",), "{:.1e}"),
    ("tok/s", ("rollout/tokens_per_second",), "{:.0f}"),
)


def format_row(logs: Mapping[str, Any], step: int, max_steps: int, seconds_left: float | None = None) -> str:
    """Format one line of about ten values, such as `step 12/40 | reward 0.51 | dropped 20% | eta 0:03:12`, without
    values that the row lacks."""
    prefix = "eval_" if any(name.startswith("eval_") for name in logs) else ""
    parts = [f"{'eval at ' * bool(prefix)}step {step}/{max_steps}"]
    for label, metrics, form in _COLUMNS:
        values = (logs.get(prefix + metric) for metric in metrics)
        value = next((value for value in values if isinstance(value, int | float)), None)
        # At the first update there are no earlier codes.
        if value is not None and not (label == "flips" and math.isnan(value)):
            parts.append(f"{label} {form.format(value)}")
    if "train_runtime" in logs:
        return f"trained {step} of {max_steps} updates in {_clock(logs['train_runtime'])}"
    if len(parts) == 1:
        parts += [f"{name} {f'{value:.4g}' if isinstance(value, float) else value}" for name, value in logs.items()]
    if seconds_left is not None and not prefix:
        parts.append(f"eta {_clock(seconds_left)}")
    return " | ".join(parts)


class _Rows(TrainerCallback):
    _start: tuple[float, int] | None = None

    @override
    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        self._start = (time.monotonic(), state.global_step)

    @override
    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs:
            return
        seconds_left = None
        if self._start is not None and (num_updates := state.global_step - self._start[1]) > 0:
            seconds = time.monotonic() - self._start[0]
            seconds_left = seconds / num_updates * (state.max_steps - state.global_step)
        self._write(format_row(logs, state.global_step, state.max_steps, seconds_left))

    def _write(self, row: str) -> None:
        print(row, flush=True)


class RowProgress(_Rows, ProgressCallback):
    """transformers' progress bar with short rows."""

    @override
    def _write(self, row: str) -> None:
        if self.training_bar is not None:
            self.training_bar.write(row)


class RowPrinter(_Rows, PrinterCallback):
    """Short rows without a progress bar, for `disable_tqdm=True`."""


def show_rows(handler: CallbackHandler) -> None:
    """Replace transformers' full rows by short ones. Other callbacks, such as a notebook's table, stay."""
    for theirs, ours in ((ProgressCallback, RowProgress), (PrinterCallback, RowPrinter)):
        if any(type(callback) is theirs for callback in handler.callbacks):
            handler.remove_callback(theirs)
            handler.add_callback(ours())


class Advisor(TrainerCallback):
    """Logs one sentence with the next step if a threshold is exceeded, once per episode. `config` has the settings of
    the run as in [`~trl_qarl.telemetry.advisor.assess`]; the rules see the last 1,000 rows."""

    def __init__(self, config: Mapping[str, Any]):
        self.config = config
        self._rows: deque[dict[str, float | None]] = deque(maxlen=1000)
        self._ongoing: frozenset[str] = frozenset()

    @override
    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs:
            return
        numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        self._rows.append({**numbers, "step": state.global_step})
        findings, self._ongoing = advise(assess(self._rows, self.config), self._ongoing)
        for finding in findings:
            logger.warning("Step %d: %s", state.global_step, finding)

    @override
    def on_train_end(self, args, state, control, **kwargs):
        flips = [row.get("quant/code_flip_rate", math.nan) for row in self._rows]
        flips = [share for share in flips if share is not None and not math.isnan(share)]
        # After more updates advice has said it.
        if state.is_world_process_zero and 0 < len(flips) < STALLED_UPDATES and not any(flips):
            logger.warning(
                "No code of the low-bit policy has changed in this run, so its quantized layers are those with which it began. Raise "
                "`learning_rate` (%s here), or train longer.",
                self.config.get("learning_rate", "unknown"),
            )


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
