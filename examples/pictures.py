"""
A model of text and pictures learns to count shapes, with INT4 rollouts in vLLM, on one GPU of 24 GB.

    pip install ".[vllm]" torchvision
    python examples/pictures.py

The pictures are drawn here. `--smoke` makes two updates on a CPU with a model in a folder: `--model FOLDER`.
"""

import random
import re
from argparse import ArgumentParser
from pathlib import Path

from datasets import Dataset, Image, List
from PIL import Image as PIL
from PIL import ImageDraw

from trl_qarl import QaRLConfig, QaRLTrainer, export_checkpoint


COLORS = ("red", "green", "blue")

# 16 prompts with 8 completions each per batch, in 2 updates.
FULL = {
    "use_vllm": True,
    "vllm_gpu_memory_utilization": 0.3,
    "bf16": True,
    "gradient_checkpointing": True,
    "num_generations": 8,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 16,
    "steps_per_generation": 32,
    "max_completion_length": 128,
    "learning_rate": 1e-6,
    "max_steps": 200,
    "save_steps": 50,
}
SMOKE = {
    "use_cpu": True,
    "num_generations": 2,
    "per_device_train_batch_size": 4,
    "steps_per_generation": 2,
    "max_completion_length": 8,
    "max_steps": 2,
    "optim": "adamw_torch",
    "save_strategy": "no",
}


def draw_problem(number, size=224):
    """A picture of some circles and squares, the question how many there are of one kind, and the answer."""
    choose = random.Random(number)
    picture = PIL.new("RGB", (size, size), "white")
    pen, cell = ImageDraw.Draw(picture), size // 4
    color, shape, count = choose.choice(COLORS), choose.choice(["circle", "square"]), 0
    # No two shapes overlap.
    for place in choose.sample(range(16), choose.randint(3, 9)):
        left, top = place % 4 * cell + cell // 8, place // 4 * cell + cell // 8
        box = left, top, left + cell * 3 // 4, top + cell * 3 // 4
        drawn = choose.choice(COLORS), choose.choice(["circle", "square"])
        (pen.ellipse if drawn[1] == "circle" else pen.rectangle)(box, fill=drawn[0])
        count += drawn == (color, shape)
    question = f"How many {color} {shape}s are there? End with `Answer: ` and the number."
    return {"prompt": [{"role": "user", "content": question}], "images": [picture], "answer": str(count)}


def make_problems(count, size=224):
    rows = [draw_problem(number, size) for number in range(count)]
    return Dataset.from_list(rows).cast_column("images", List(Image()))


def correct(completions, answer, **kwargs):
    """1 where the number after the last `Answer:` is the right one, else 0."""
    given = [re.findall(r"Answer:\s*(\d+)", completion[0]["content"]) for completion in completions]
    return [float(bool(found) and found[-1] == right) for found, right in zip(given, answer, strict=True)]


def main():
    parser = ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--model", default="Qwen/Qwen2.5-VL-3B-Instruct")
    parser.add_argument("--output_dir", default="outputs/pictures")
    parser.add_argument("--smoke", action="store_true", help="two updates on a CPU, without vLLM")
    args = parser.parse_args()

    options = SMOKE if args.smoke else FULL
    trainer = QaRLTrainer(
        model=args.model,
        reward_funcs=correct,
        train_dataset=make_problems(8 if args.smoke else 2000),
        args=QaRLConfig(args.output_dir, scheme="w4a16", logging_steps=1, report_to="none", **options),
    )
    print(trainer.swap_report)
    trainer.train()
    trainer.save_model()
    policy = export_checkpoint(trainer.model, Path(args.output_dir, "w4a16"), trainer.processing_class)
    print(f"Serve the trained policy: vllm serve {policy}")


if __name__ == "__main__":
    main()
