"""
Pretrains a model of 0.6 million parameters from random weights on sums modulo 100, written out step by step.

    python benchmarks/study/chain_sums.py --output_dir DIR
    python benchmarks/study/chain_sums.py --output_dir DIR --steps 60 90 --layers 2 --key_value_heads 1

A problem is `03:38+47=` and its answer `85;02:47+85=32;01:85+32=17.`, one token per character. Each step adds the last
two numbers and counts down. Pretraining stops while the model still makes a mistake in most long chains, so that
reinforcement learning has something to improve (benchmarks/study/README.md).
"""

import json
import random
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path


# Minimum and maximum number of steps in a chain.
STEPS = (10, 15)
NUM_HELD_OUT = 400
CHARACTERS = "0123456789+=;:."
# Stages of pretraining: maximum number of steps, number of batches. For shorter or longer chains, `curriculum` ends
# with a stage of the last one's size. The learning rate falls linearly to 0 in the last stage.
CURRICULUM = ((1, 100), (3, 50), (15, 300))
TOKENS_PER_BATCH = 4000


def make_problem(first: int, second: int, num_steps: int) -> dict[str, str]:
    """
    Return the prompt and the answer of a chain.

    >>> make_problem(38, 47, 3)
    {'prompt': '03:38+47=', 'answer': '85;02:47+85=32;01:85+32=17.'}
    """
    prompt, answer = f"{num_steps:02}:{first}+{second}=", ""
    for left in reversed(range(num_steps)):
        first, second = second, (first + second) % 100
        answer += f"{second:02};{left:02}:{first:02}+{second:02}=" if left else f"{second:02}."
    return {"prompt": prompt, "answer": answer}


def split_pairs() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the first two numbers of chains, for training and held out; the same for every seed."""
    pairs = [(first, second) for first in range(10, 100) for second in range(10, 100)]
    random.Random(0).shuffle(pairs)
    return pairs[NUM_HELD_OUT:], pairs[:NUM_HELD_OUT]


def num_new_tokens(steps: tuple[int, int]) -> int:
    """
    Return the token limit: the longest answer, the end token, and room for two more steps.

    >>> num_new_tokens((10, 15))
    196
    """
    return 12 * (steps[1] + 2) - 8


def make_problems(steps: tuple[int, int] = STEPS) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return training and held-out problems. No held-out pair of first numbers is trained on, with any length."""
    rng = random.Random(0)
    train, held_out = ([make_problem(*pair, rng.randint(*steps)) for pair in pairs] for pairs in split_pairs())
    starts = [{problem["prompt"].split(":")[1] for problem in problems} for problems in (train, held_out)]
    if starts[0] & starts[1]:
        raise ValueError("A held-out problem is also one to train on.")
    return train, held_out


def right_sum(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """
    Reward 1 for a completion that ends with the right last sum and a full stop, else 0. Earlier steps do not count.
    The only sum of a chain of one step is in the prompt, and the completion is the result.

    >>> right_sum(["85;02:47+85=32;01:85+32=17.", "17.", "85;02:47+85=32;01:85+32=17"], ["01:85+32=17."] * 3)
    [1.0, 0.0, 0.0]
    >>> right_sum(["85.", "1785."], ["85."] * 2)
    [1.0, 0.0]
    """
    rewards = []
    for text, right in zip(completions, answer, strict=True):
        _, equals, last = right.rpartition("=")
        rewards.append(float(text.endswith(f"={last}") if equals else text == right))
    return rewards


def make_tokenizer():
    """Return a tokenizer with one token per character, `<pad>` and `<eos>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left", model_max_length=2048
    )


def make_model(seed: int = 0, layers: int = 3, key_value_heads: int = 4):
    """Return a Llama with 0.64 million parameters, whose matrices have 128 or 384 inputs. With 2 layers and one
    key-value head it has 0.38 million."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        # The usual 0.02 suits wide models. This one learns sums many times faster from 0.08.
        initializer_range=0.08,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def chain_steps(model) -> tuple[int, int]:
    """Return the minimum and maximum number of steps in the last stage of a model's pretraining."""
    return tuple(getattr(model.config, "chain_steps", STEPS))


def answer_problems(model, tokenizer, problems: list[dict[str, str]], temperature: float, bf16: bool) -> list[str]:
    """Return one completion for each problem; greedy at temperature 0."""
    import torch

    was_training, texts = model.training, []
    model.eval()
    options = {
        "do_sample": temperature > 0,
        "max_new_tokens": num_new_tokens(chain_steps(model)),
        "pad_token_id": tokenizer.pad_token_id,
    }
    options |= {"temperature": temperature, "top_k": 0} if temperature > 0 else {}
    for start in range(0, len(problems), 128):
        prompts = [problem["prompt"] for problem in problems[start : start + 128]]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            tokens = model.generate(**inputs, **options)
        texts += tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    model.train(was_training)
    return texts


def score(texts: list[str], problems: list[dict[str, str]]) -> float:
    """Return the share of problems solved."""
    return sum(right_sum(texts, [problem["answer"] for problem in problems])) / len(problems)


def curriculum(steps: tuple[int, int]) -> list[tuple[int, int]]:
    """
    Return the maximum number of steps and the number of batches of each stage.

    >>> curriculum((60, 90))
    [(1, 100), (3, 50), (15, 300), (90, 300)]
    >>> curriculum((2, 2))
    [(1, 100), (2, 300)]
    """
    shorter = [stage for stage in CURRICULUM if stage[0] < steps[1]]
    return [*shorter, (steps[1], CURRICULUM[-1][1])]


def pretraining_batches(tokenizer, pairs: list[tuple[int, int]], stages: list[tuple[int, int]]) -> Iterator[dict]:
    """Yield batches of chains of one length for the stages of [`curriculum`], starting with `pairs`. Only the answers
    have labels."""
    import torch

    rng = random.Random(1)
    for max_steps, num_batches in stages:
        for _ in range(num_batches):
            num_steps = rng.randint(max(1, max_steps // 2), max_steps)
            chosen = rng.choices(pairs, k=TOKENS_PER_BATCH // (12 * num_steps))
            problems = [make_problem(*pair, num_steps) for pair in chosen]
            ids = torch.tensor([tokenizer.encode(p["prompt"] + p["answer"]) + [1] for p in problems])
            labels = ids.clone()
            labels[:, : len(problems[0]["prompt"])] = -100
            yield {"input_ids": ids, "labels": labels}


def pretrain(output_dir: Path, target: float, learning_rate: float, steps: tuple[int, int], model) -> None:
    """Train `model` until it solves a share `target` of 128 training problems at temperature 1, and save it."""
    import torch

    tokenizer = make_tokenizer()
    model.config.chain_steps = steps
    probe = make_problems(steps)[0][:128]
    matrices = [p for name, p in model.named_parameters() if p.ndim > 1 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=10 * learning_rate, weight_decay=0.0),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    stages = curriculum(steps)
    last, num_steps = stages[-1][1], sum(num_batches for _, num_batches in stages)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (num_steps - step) / last))
        for optimizer in optimizers
    ]
    start, history = time.monotonic(), []
    for step, batch in enumerate(pretraining_batches(tokenizer, split_pairs()[0], stages), 1):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step % 25 == 0:
            row = {"step": step, "seconds": round(time.monotonic() - start), "loss": round(loss.item(), 4)}
            # Scoring takes long, and a model with a larger loss per token solves too few.
            if step > num_steps - last and loss < max(0.03, 0.5 / steps[1]):
                row["sampled"] = score(answer_problems(model, tokenizer, probe, 1.0, bf16=False), probe)
            history.append(row)
            print(json.dumps(row), flush=True)
            model.save_pretrained(output_dir)
            if row.get("sampled", 0.0) >= target:
                break
    tokenizer.save_pretrained(output_dir)
    (output_dir / "pretraining.json").write_text(json.dumps(history))


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--target", type=float, default=0.4, help="stop when this share of sampled answers is right")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, nargs=2, default=STEPS, help="fewest and most of a chain")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--key_value_heads", type=int, default=4, help="of 4 heads")
    args = parser.parse_args()
    import decoding

    args.output_dir.mkdir(parents=True, exist_ok=True)
    model = make_model(layers=args.layers, key_value_heads=args.key_value_heads)
    decoding.decode_faster()
    pretrain(args.output_dir, args.target, args.learning_rate, tuple(args.steps), model)


if __name__ == "__main__":
    main()
