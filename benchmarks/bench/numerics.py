"""
`python -m benchmarks.bench numerics`: training steps with `numerics="engine"` against `"fast"`, side by side in one
trainer.

One [`~trl_qarl.QaRLTrainer`] runs generation batches of two updates, and its model changes the arithmetic between
batches. So both have the same memory, optimizer and engine, a slow minute of the machine hits both, and a ratio is the
median over pairs of neighbouring batches.
"""

import statistics
import tempfile
import time
from typing import Any


UPDATES = 2
"""Updates per generation batch."""

# What the log calls the parts of a batch's time, and the table.
_PARTS = {
    "rollout": ("rollout/seconds",),
    "scoring": ("step/scoring_seconds",),
    "forward and backward": ("step/forward_backward_seconds",),
    "publish": ("publish/seconds",),
}


def measure_numerics(path: str, prompts: list[list[dict[str, str]]], schemes: list[str], args) -> list[dict[str, Any]]:
    """
    One row per scheme: median seconds of a generation batch and of its parts with `"fast"`, and `"engine"` / `"fast"`.

    Args:
        path (`str`):
            Folder of the model.
        prompts (`list[list[dict[str, str]]]`):
            Conversations to answer, 4 completions each.
        schemes (`list[str]`):
            Schemes to train with.
        args (`Namespace`):
            `rollout` (`"transformers"`, `"colocate"` or `"server"`), `new_tokens`, `repeats`, `tokens`, the number of
            sequences per generation batch, and `sequence_length`, that of prompt and answer, or `None`.
    """
    rows = []
    for scheme in schemes:
        for num_sequences in args.tokens:
            times = _run(path, prompts, scheme, num_sequences, args)
            row: dict[str, Any] = {"scheme": scheme, "rollouts": args.rollout, "sequences": num_sequences}
            if args.sequence_length is not None:
                row["length"] = args.sequence_length
            for part in ("whole", *_PARTS):
                fast, engine = ([batch.get(part, 0.0) for batch in times[name]] for name in ("fast", "engine"))
                if all(fast):
                    ratios = [b / a for a, b in zip(fast, engine, strict=True)]
                    row[f"{part}, fast s"] = statistics.median(fast)
                    row[f"{part}, engine / fast"] = statistics.median(ratios)
                    row[f"{part}, least and most"] = [min(ratios), max(ratios)]
            rows.append(row)
            print(row, flush=True)
    return rows


def _run(path: str, prompts, scheme: str, num_sequences: int, args) -> dict[str, list[dict[str, float]]]:
    """Seconds of every batch by numerics, without the first of each."""
    from datasets import Dataset
    from transformers import PrinterCallback, ProgressCallback

    from trl_qarl.engines.server_process import free_port
    from trl_qarl.trainer.qarl_config import QaRLConfig
    from trl_qarl.trainer.qarl_trainer import QaRLTrainer

    use_vllm = args.rollout != "transformers"
    with tempfile.TemporaryDirectory() as folder:
        config = QaRLConfig(
            folder,
            scheme=scheme,
            numerics="fast",
            use_cpu=True,
            bf16=True,
            num_generations=4,
            per_device_train_batch_size=num_sequences // UPDATES,
            steps_per_generation=UPDATES,
            max_completion_length=args.new_tokens,
            max_steps=2 * UPDATES * (args.repeats + 1),
            learning_rate=1e-6,
            optim="adamw_torch_fused",
            gradient_checkpointing=False,
            use_vllm=use_vllm,
            vllm_mode=args.rollout if use_vllm else "server",
            vllm_server_autostart=args.rollout == "server",
            vllm_server_port=free_port(),
            vllm_max_model_length=max(512, (args.sequence_length or 0) + 64) if use_vllm else None,
            generation_kwargs={"ignore_eos": True} if use_vllm else None,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            dataloader_pin_memory=False,
        )
        trainer = QaRLTrainer(path, _count_tokens, config, Dataset.from_dict({"prompt": prompts}))
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        alternate = _make_alternation()(trainer)
        trainer.add_callback(alternate)
        trainer.train()
    return {name: batches[1:] for name, batches in alternate.times.items()}


def _count_tokens(completions, completion_ids, **kwargs) -> list[float]:
    return [float(len(set(ids))) for ids in completion_ids]


def _make_alternation():
    """A class, because transformers is imported late."""
    from transformers import TrainerCallback

    from trl_qarl.bitwise.attach import attach_engine_numerics, detach_engine_numerics

    class Alternate(TrainerCallback):
        """Engine numerics for every other generation batch, and the seconds of each batch."""

        def __init__(self, trainer):
            self.trainer, self.times = trainer, {"fast": [], "engine": []}
            self.name, self.start = "fast", 0.0

        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step % UPDATES:
                return
            if state.global_step:
                self.name = "fast" if self.name == "engine" else "engine"
                if self.name == "engine":
                    attach_engine_numerics(self.trainer.model)
                else:
                    detach_engine_numerics(self.trainer.model)
            self.times[self.name].append({"whole": 0.0})
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % UPDATES == 0:
                self.times[self.name][-1]["whole"] = time.perf_counter() - self.start

        def on_log(self, args, state, control, logs, **kwargs):
            batch = self.times[self.name][-1]
            for part, names in _PARTS.items():
                batch[part] = batch.get(part, 0.0) + sum(logs.get(name, 0.0) for name in names)

    return Alternate
