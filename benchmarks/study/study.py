r"""
Trains and evaluates one cell of the appendix of benchmarks/study/README.md: SmolLM2-135M-Instruct learns a task and is
evaluated in the form in which it would be deployed.

    python benchmarks/study/study.py train --output_dir DIR --quantize_learner true --objective tbpo \
        --scheme w4a16-observer --seed 0
    python benchmarks/study/study.py evaluate --output_dir DIR

`--task addition` has the problems and the reward of `trl-qarl quickstart`; `--task counting` asks for longer
completions. Rollouts come from a vLLM server started for the run. `--lora_mode adapter` or `merged` trains an adapter
(docs/adapters.md), with rollouts and answers from the learner's own layers.
"""

import json
import random
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trl_qarl.scripts import quickstart


NUM_SAMPLES, SAMPLING_TEMPERATURE = 400, 0.6
# Scheme to which bf16 master weights are quantized after training, for comparison.
QUANTIZED_SCHEME = "w4a16-observer"


def share_in_place(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """Reward the share of the requested numbers before the first wrong one; 0 for an answer with too many numbers."""
    rewards = []
    for text, expected in zip(completions, answer, strict=True):
        given, asked = text.split(), expected.split()
        wrong = (i for i, (x, y) in enumerate(zip(given, asked, strict=False)) if x != y)
        rewards.append(next(wrong, len(given)) / len(asked) if len(given) <= len(asked) else 0.0)
    return rewards


def make_counts(num_held_out: int, eos_token: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return training and held-out problems: `46 to 51:` after two worked examples, for all other numbers from 10 to
    94."""
    counts = {start: " ".join(map(str, range(start, start + 6))) for start in range(10, 95)}
    examples = "".join(f"{start} to {start + 5}: {counts.pop(start)}{eos_token}\n" for start in (23, 91))
    problems = [{"prompt": f"{examples}{start} to {start + 5}:", "answer": answer} for start, answer in counts.items()]
    random.Random(0).shuffle(problems)
    return problems[num_held_out:], problems[:num_held_out]


@dataclass(frozen=True)
class Task:
    """A task: training and held-out problems, the same for every seed, and the reward."""

    make_problems: Callable[[int, str], tuple[list[dict[str, str]], list[dict[str, str]]]]
    reward: Callable[..., list[float]]
    num_held_out: int
    max_new_tokens: int
    num_prompts: int
    # TBPO's bands. A geometric mean over 4 or 20 tokens moves far more per update than one over thousands: the paper's
    # bands of 1e-4 would drop almost every sequence here.
    bands: dict[str, float]


TASKS = {
    "addition": Task(
        make_problems=lambda num_held_out, eos_token: quickstart.make_problems(num_held_out, 0, eos_token),
        reward=quickstart.exact_sum,
        num_held_out=100,
        max_new_tokens=6,
        num_prompts=6,
        bands={"positive_epsilon_high": 0.1, "negative_epsilon_low": 0.1, "negative_epsilon_high": 0.15},
    ),
    "counting": Task(
        make_problems=make_counts,
        reward=share_in_place,
        num_held_out=40,
        max_new_tokens=26,
        num_prompts=4,
        bands={"positive_epsilon_high": 0.05, "negative_epsilon_low": 0.05, "negative_epsilon_high": 0.075},
    ),
}


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("action", choices=["train", "evaluate"])
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--task", choices=list(TASKS), default="addition")
    parser.add_argument("--quantize_learner", choices=["true", "false"], default="true")
    parser.add_argument("--objective", default="tbpo")
    parser.add_argument("--scheme", default="w4a16-observer")
    parser.add_argument("--numerics", choices=["fast", "engine"], default="fast")
    parser.add_argument("--lora_mode", choices=["none", "adapter", "merged"], default="none")
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_prompts", type=int, help="per generation batch, instead of the task's")
    parser.add_argument("--max_steps", type=int, default=40, help="updates, two per generation batch")
    args = parser.parse_args()
    task = TASKS[args.task]
    if args.action == "train":
        train(args)
    elif args.lora_mode == "none":
        evaluate(args.output_dir, task)
    else:
        evaluate_adapter(args.output_dir, task)


def train(args: Namespace) -> None:
    import torch
    from datasets import Dataset

    from trl_qarl import QaRLConfig, QaRLTrainer
    from trl_qarl.demo.smollm2 import convert_smollm2
    from trl_qarl.quantization.gemm import has_fast_bf16
    from trl_qarl.rollout.server_process import free_port

    task = TASKS[args.task]
    model = convert_smollm2(Path.home() / ".cache" / "trl_qarl" / "SmolLM2-135M-Instruct")
    has_adapter = args.lora_mode != "none"
    peft_config = None
    if has_adapter:
        from peft import LoraConfig

        peft_config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    config = QaRLConfig(
        str(args.output_dir),
        quantize_learner=args.quantize_learner == "true",
        objective=args.objective,
        scheme=args.scheme,
        numerics=args.numerics,
        seed=args.seed,
        max_steps=args.max_steps,
        **(task.bands if args.objective == "tbpo" else {}),
        **({"lora_mode": args.lora_mode} if has_adapter else {}),
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=3,
        optim="adamw_torch_fused",
        adam_beta2=0.95,
        # 8 completions per prompt, in 2 updates.
        num_generations=8,
        per_device_train_batch_size=4 * (args.num_prompts or task.num_prompts),
        steps_per_generation=2,
        max_completion_length=task.max_new_tokens,
        use_vllm=not has_adapter,
        vllm_mode="server",
        vllm_server_autostart=not has_adapter,
        vllm_server_port=free_port(),
        vllm_max_model_length=128,
        gradient_checkpointing=False,
        use_cpu=not torch.accelerator.is_available(),
        bf16=torch.accelerator.is_available() or has_fast_bf16(),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        dataloader_pin_memory=False,
    )
    problems, _ = make_problems(task, model)
    trainer = QaRLTrainer(str(model), task.reward, config, Dataset.from_list(problems), peft_config=peft_config)
    trainer.train()
    trainer.save_model(args.output_dir / "masters")


def make_problems(task: Task, model: Path) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    from transformers import AutoTokenizer

    return task.make_problems(task.num_held_out, AutoTokenizer.from_pretrained(model).eos_token)


def evaluate(output_dir: Path, task: Task) -> None:
    """
    Print the held-out problems solved in vLLM as JSON: `greedy` and `sampled` by the deployed policy, which made the
    rollouts. For comparison, `unquantized ...` by the master weights as they are, or after a bf16 run `quantized ...`
    by its weights quantized after training.
    """
    deployed = json.loads((output_dir / "run.json").read_text())["scheme"]
    name, other = ("quantized", QUANTIZED_SCHEME) if deployed == "bf16" else ("unquantized", "bf16")
    scores = _score(task, output_dir / "masters", deployed)
    scores |= {f"{name} {key}": value for key, value in _score(task, output_dir / "masters", other).items()}
    print(json.dumps(scores))


def _score(task: Task, masters: Path, scheme: str) -> dict[str, dict[str, int]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import SamplingParams

    from trl_qarl import export_checkpoint, get_scheme, load_engine, prepare_model

    _, problems = make_problems(task, masters)
    model = AutoModelForCausalLM.from_pretrained(masters, dtype=torch.float32)
    dtype = getattr(torch, json.loads((masters / "qarl.json").read_text())["scale_dtype"])
    prepare_model(model, get_scheme(scheme), scale_dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        export_checkpoint(model, folder, AutoTokenizer.from_pretrained(masters), dtype)
        engine = load_engine(folder, max_model_len=128)
    scores = {}
    samples = NUM_SAMPLES // len(problems)
    for name, temperature, num_samples in (("greedy", 0.0, 1), ("sampled", SAMPLING_TEMPERATURE, samples)):
        parameters = SamplingParams(n=num_samples, temperature=temperature, max_tokens=task.max_new_tokens)
        outputs = engine.generate([problem["prompt"] for problem in problems], parameters, use_tqdm=False)
        texts = [completion.text for output in outputs for completion in output.outputs]
        answers = [problem["answer"] for problem in problems for _ in range(num_samples)]
        scores[name] = {"correct": int(sum(quickstart.exact_sum(texts, answers))), "total": len(texts)}
    return scores


def evaluate_adapter(output_dir: Path, task: Task) -> None:
    """
    Print the held-out problems solved greedily as JSON: `greedy` by the policy that made the rollouts, `before greedy`
    by its base without the adapter, and, except with `--lora_mode merged`, `quantized greedy` by base and adapter
    merged and quantized after training.
    """
    import torch

    from trl_qarl.adapters.base import load_adapter, merge_adapter, prepare_base
    from trl_qarl.quantization.schemes import get_scheme

    folder = output_dir / "masters"
    record = json.loads((folder / "qarl.json").read_text())
    dtype, is_merged = getattr(torch, record["scale_dtype"]), record["lora_mode"] == "merged"

    def load(scheme: str, **kwargs):
        model = load_adapter(folder, {"dtype": "float32"}, is_trainable=False)
        prepare_base(model, get_scheme(scheme), exclude_modules=None, scale_dtype=dtype, **kwargs)
        return model

    model = load(record["scheme"], keep_masters=False, is_merged=is_merged)
    scores = {"greedy": _score_own(task, model, folder, dtype)}
    with model.disable_adapter():
        scores["before greedy"] = _score_own(task, model, folder, dtype)
    if not is_merged:
        model, *_ = merge_adapter(load(QUANTIZED_SCHEME, keep_masters=True))
        scores["quantized greedy"] = _score_own(task, model, folder, dtype)
    print(json.dumps(scores))


def _score_own(task: Task, model, folder: Path, dtype) -> dict[str, int]:
    """
    Return the number of problems that `model` solves greedily. As in its export, everything that is not quantized is
    rounded to the engine's `dtype`.
    """
    import torch
    from transformers import AutoTokenizer

    from trl_qarl.quantization.swap import engine_precision

    _, problems = make_problems(task, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    prompts = [problem["prompt"] for problem in problems]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    autocast = torch.autocast(model.device.type, dtype, enabled=dtype != torch.float32)
    with torch.no_grad(), engine_precision(model, dtype), autocast:
        tokens = model.generate(
            **inputs, do_sample=False, max_new_tokens=task.max_new_tokens, pad_token_id=tokenizer.pad_token_id
        )
    texts = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    correct = quickstart.exact_sum(texts, [problem["answer"] for problem in problems])
    return {"correct": int(sum(correct)), "total": len(texts)}


if __name__ == "__main__":
    main()
