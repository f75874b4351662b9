r"""
Pretrains a vision-language model of 0.9 million parameters to count drawn shapes, and trains it by GRPO to count them
right.

    python benchmarks/study/shapes.py pretrain --output_dir MODEL
    python benchmarks/study/shapes.py train --model MODEL --output_dir DIR --scheme w4a16 --seed 0 \
        --quantize_learner true
    python benchmarks/study/shapes.py train --model MODEL --output_dir DIR --scheme w4a16 --use_vllm

A picture is a row of 6 cells with circles, squares and triangles in three colours. The prompt is `red circle` and the
picture. The answer counts along the row, `0 1 1 2 2 3`, and only its last number is rewarded. Pretraining imitates a
teacher who overlooks three of five small shapes, so most answers of the pretrained model are wrong, and only rewards
say that small shapes count. Rollouts come from the learner's own layers, or with `--use_vllm` from an in-process vLLM.
`DIR/scores.json` has the final scores of the policy. Needs torchvision.
"""

import itertools
import json
import random
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parent))

COLORS = {"red": (210, 40, 40), "green": (40, 160, 60), "blue": (50, 70, 210)}
SHAPES = ("circle", "square", "triangle")
KINDS = tuple(itertools.product(COLORS, SHAPES))
NUM_CELLS = 6
# Side of a cell in pixels; the model sees a cell as one token.
CELL = 28
# Smallest and largest side of a shape in pixels, largest side of a small one, and the share of small ones overlooked.
SIZES, SMALL, OVERLOOKED = (11, 20), 15, 0.6
NUM_TRAINED, NUM_HELD_OUT = 2000, 256
# The counts, the end token, and room for a few more.
NUM_NEW_TOKENS = NUM_CELLS + 4
# Size and number of the pretraining batches.
BATCH_SIZE, NUM_BATCHES = 96, 500
NUM_UPDATES_PER_BATCH, NUM_PROMPTS, NUM_GENERATIONS = 2, 16, 8
# Options by scheme of a cell. For most matrices, groups of 128 are whole rows, as elsewhere in the study.
VARIANTS: dict[str, dict[str, Any]] = {"bf16": {"scheme": "bf16"}, "w4a16": {"scheme": "w4a16", "group_size": 128}}
Problem = dict[str, Any]


def draw_row(number: int | str, overlooked: float = 0.0) -> tuple[Any, tuple[str, str], list[int]]:
    """Return a picture, a kind of shape, and its count up to each cell, without a share `overlooked` of the small
    shapes. All true counts are equally frequent."""
    from PIL import Image, ImageDraw

    choose = random.Random(number)
    kind = choose.choice(KINDS)
    places = set(choose.sample(range(NUM_CELLS), choose.randint(0, NUM_CELLS)))
    others = [None, *(other for other in KINDS if other != kind)]
    cells = [kind if place in places else choose.choice(others) for place in range(NUM_CELLS)]
    picture = Image.new("RGB", (NUM_CELLS * CELL, CELL), "white")
    pen = ImageDraw.Draw(picture)
    counted = []
    for place, cell in enumerate(cells):
        size = choose.randint(*SIZES)
        counted.append(cell == kind and not (size <= SMALL and choose.random() < overlooked))
        if cell is not None:
            color, shape = cell
            left, top = place * CELL + choose.randint(2, 26 - size), choose.randint(2, 26 - size)
            fill = tuple(min(255, max(0, value + choose.randint(-40, 40))) for value in COLORS[color])
            box = left, top, left + size, top + size
            if shape == "triangle":
                pen.polygon([(left, top + size), (left + size, top + size), (left + size // 2, top)], fill=fill)
            else:
                (pen.ellipse if shape == "circle" else pen.rectangle)(box, fill=fill)
    return picture, kind, list(itertools.accumulate(counted))


def make_problem(number: int | str, overlooked: float = 0.0) -> Problem:
    """Return prompt, picture and answer; with `overlooked`, the teacher's answer."""
    picture, kind, counts = draw_row(number, overlooked)
    content = [{"type": "text", "text": " ".join(kind)}, {"type": "image"}]
    return {
        "prompt": [{"role": "user", "content": content}],
        "images": [picture],
        "answer": " ".join(map(str, counts)),
    }


def make_problems() -> tuple[list[Problem], list[Problem]]:
    """Return training and held-out problems. Pretraining uses others."""
    return [make_problem(f"train {number}") for number in range(NUM_TRAINED)], [
        make_problem(f"held out {number}") for number in range(NUM_HELD_OUT)
    ]


def right_count(completions: Sequence[str | list[dict[str, str]]], answer: list[str], **kwargs) -> list[float]:
    """
    Reward 1 for a completion whose last number is right, else 0. Earlier numbers do not count.

    >>> right_count(["0 1 1", "2 1", "0 1 2", ""], ["0 0 1"] * 4)
    [1.0, 1.0, 0.0, 0.0]
    """
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [float(text.split()[-1:] == right.split()[-1:]) for text, right in zip(texts, answer, strict=True)]


def make_processor():
    """Return a processor with one token per word or number, and Qwen2.5-VL's tokens for pictures."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    words = ["<pad>", "<eos>", *COLORS, *SHAPES, *map(str, range(NUM_CELLS + 1))]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", padding_side="left", model_max_length=512
    )
    tokenizer.add_tokens(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"], special_tokens=True)
    template = (
        "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    size = {"shortest_edge": CELL**2, "longest_edge": NUM_CELLS * CELL**2}
    return Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(size=size), tokenizer, Qwen2VLVideoProcessor(size=size), chat_template=template
    )


def make_model(processor, seed: int = 0):
    """Return a Qwen2.5-VL of width 128 with three layers in its language model and two in its vision tower."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    ids = {name: processor.tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    ids |= {name: processor.tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>") for name in ("image", "video")}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 64,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 512,
            # The last section, with the lowest frequencies, encodes the position of a cell in its row.
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 2, 12]},
            **special,
        },
        vision_config={
            "depth": 2,
            "num_heads": 4,
            "hidden_size": 128,
            "intermediate_size": 256,
            "out_hidden_size": 128,
            "fullatt_block_indexes": [1],
        },
        tie_word_embeddings=False,
        **{f"{name}_token_id": token for name, token in ids.items()},
        **special,
    )
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config).float()
    # The usual 0.02 suits wide models.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    return model


def make_inputs(processor, problems: Sequence[Problem]) -> dict[str, Any]:
    """Return the model's inputs for prompts and pictures."""
    conversations = []
    for problem in problems:
        text, _ = problem["prompt"][0]["content"]
        content = [text, {"type": "image", "image": problem["images"][0]}]
        conversations.append([{"role": "user", "content": content}])
    return dict(processor.apply_chat_template(conversations, tokenize=True, return_dict=True, return_tensors="pt"))


def answer_problems(model, processor, problems: Sequence[Problem], temperature: float) -> list[str]:
    """Return one completion for each problem; greedy at temperature 0."""
    import torch

    was_training, texts = model.training, []
    model.eval()
    options = {"do_sample": temperature > 0, "max_new_tokens": NUM_NEW_TOKENS, "pad_token_id": 0}
    options |= {"temperature": temperature, "top_k": 0} if temperature > 0 else {}
    for start in range(0, len(problems), 128):
        inputs = make_inputs(processor, problems[start : start + 128])
        with torch.no_grad():
            tokens = model.generate(**inputs, **options)
        texts += processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    model.train(was_training)
    return texts


def score(texts: list[str], problems: Sequence[Problem]) -> float:
    """Return the share of problems solved."""
    return sum(right_count(texts, [problem["answer"] for problem in problems])) / len(problems)


def pretraining_batches(processor) -> Iterator[dict[str, Any]]:
    """Yield batches of problems with the teacher's answers. Only the answers have labels."""
    import torch

    for batch in range(NUM_BATCHES):
        problems = [make_problem(f"pretraining {batch} {number}", OVERLOOKED) for number in range(BATCH_SIZE)]
        inputs = make_inputs(processor, problems)
        answers = torch.tensor(
            processor.tokenizer([problem["answer"] + " <eos>" for problem in problems])["input_ids"]
        )
        labels = torch.cat([torch.full_like(inputs["input_ids"], -100), answers], 1)
        added = {"input_ids": answers, "attention_mask": torch.ones_like(answers)}
        added["mm_token_type_ids"] = torch.zeros_like(answers)
        yield inputs | {name: torch.cat([inputs[name], more], 1) for name, more in added.items()} | {"labels": labels}


def pretrain(args: Namespace) -> None:
    """Train a new model and save it. Learning rates fall linearly to 0 over the second half."""
    import torch
    from chain_sums import muon_direction

    processor = make_processor()
    model = make_model(processor)
    probe = [make_problem(f"train {number}") for number in range(128)]
    matrices = [
        p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name and "head" not in name
    ]
    momenta = {p: torch.zeros_like(p) for p in matrices}
    others = [p for p in model.parameters() if p not in momenta]
    optimizers = [
        torch.optim.SGD(matrices, lr=10 * args.learning_rate),
        torch.optim.AdamW(others, lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    args.output_dir.mkdir(parents=True, exist_ok=True)
    processor.save_pretrained(args.output_dir)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 2 - 2 * step / NUM_BATCHES))
        for optimizer in optimizers
    ]
    start, history = time.monotonic(), []
    for step, batch in enumerate(pretraining_batches(processor), 1):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for matrix, momentum in momenta.items():
            matrix.grad = muon_direction(matrix.grad, momentum)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if step % 25 == 0 or step == NUM_BATCHES:
            row = {"step": step, "seconds": round(time.monotonic() - start), "loss": round(loss.item(), 4)}
            for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
                row[name] = score(answer_problems(model, processor, probe, temperature), probe)
            history.append(row)
            print(json.dumps(row), flush=True)
    model.save_pretrained(args.output_dir)
    (args.output_dir / "pretraining.json").write_text(json.dumps(history))


def make_trainer(args: Namespace):
    from datasets import Dataset, Image, List
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from trl_qarl import QaRLConfig, QaRLTrainer

    training, _ = make_problems()
    config = QaRLConfig(
        str(args.output_dir),
        **VARIANTS[args.scheme],
        quantize_learner=args.quantize_learner == "true",
        objective=args.objective,
        seed=args.seed,
        learning_rate=args.learning_rate,
        max_steps=max(args.max_steps, 1),
        lr_scheduler_type="linear",
        warmup_steps=NUM_UPDATES_PER_BATCH,
        optim="adamw_torch_fused",
        adam_beta2=0.95,
        num_generations=NUM_GENERATIONS,
        per_device_train_batch_size=NUM_PROMPTS * NUM_GENERATIONS // NUM_UPDATES_PER_BATCH,
        steps_per_generation=NUM_UPDATES_PER_BATCH,
        max_completion_length=NUM_NEW_TOKENS,
        use_vllm=args.use_vllm,
        vllm_max_model_length=128,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return QaRLTrainer(
        AutoModelForImageTextToText.from_pretrained(args.model, dtype="float32"),
        right_count,
        config,
        Dataset.from_list(training).cast_column("images", List(Image())),
        processing_class=AutoProcessor.from_pretrained(args.model),
    )


def train(args: Namespace) -> None:
    """Train a pretrained model by GRPO and score it."""
    trainer = make_trainer(args)
    if args.max_steps:
        trainer.train()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    (args.output_dir / "scores.json").write_text(json.dumps(score_policies(trainer, args.num_scored)) + "\n")


def score_policies(trainer, num_scored: int) -> dict[str, dict[str, int]]:
    """
    Return the number of held-out problems solved: `greedy` and `sampled` (temperature 1) by the deployed policy. For
    comparison, `unquantized greedy` by its masters, or `w4a16 greedy` by a bf16 run's masters, quantized afterwards.
    """
    import torch

    from trl_qarl import get_scheme, prepare_model
    from trl_qarl.quantization.swap import disable_quantized_forward, quantized_forward, restore_model

    model = trainer.model
    problems = make_problems()[1][:num_scored]

    def solved(temperature: float) -> dict[str, int]:
        torch.manual_seed(0)
        texts = answer_problems(model, trainer.processing_class, problems, temperature)
        return {"correct": round(score(texts, problems) * len(problems)), "total": len(problems)}

    with quantized_forward(model):
        scores = {"greedy": solved(0.0), "sampled": solved(1.0)}
    if trainer.args.is_quantized:
        disable_quantized_forward(model)
        return scores | {"unquantized greedy": solved(0.0)}
    restore_model(model)
    prepare_model(model, get_scheme(**VARIANTS["w4a16"]), scale_dtype=torch.float32)
    return scores | {"w4a16 greedy": solved(0.0)}


def main() -> None:
    parser = ArgumentParser(description=" ".join(__doc__.split("\n\n")[0].split()))
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("pretrain", help="teach a new model")
    command.set_defaults(run=pretrain)
    command.add_argument("--output_dir", type=Path, required=True)
    command.add_argument("--learning_rate", type=float, default=2e-3)
    command = commands.add_parser("train", help="train a pretrained model by GRPO")
    command.set_defaults(run=train)
    command.add_argument("--model", required=True, help="what `pretrain` wrote")
    command.add_argument("--output_dir", type=Path, required=True)
    command.add_argument("--scheme", choices=list(VARIANTS), default="w4a16")
    command.add_argument("--quantize_learner", choices=["true", "false"], default="true")
    command.add_argument("--objective", default="grpo-tis")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--max_steps", type=int, default=80, help="updates, two per generation batch")
    command.add_argument("--learning_rate", type=float, default=1e-4)
    command.add_argument("--num_scored", type=int, default=NUM_HELD_OUT, help="held-out problems")
    command.add_argument("--use_vllm", action="store_true", help="draw rollouts in a vLLM in this process")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
