"""Sums of two numbers: the quickstart's task."""

import random


__all__ = ["exact_sum", "make_problems"]

MAX_NEW_TOKENS = 6


def make_problems(num_eval: int, seed: int, eos_token: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """
    Training and held-out problems, `{"prompt", "answer"}`, disjoint: all sums of 10..49 and 1..9, shuffled by `seed`.

    Raises:
        ValueError: if `num_eval` leaves fewer than half of the 360 problems for training.
    """
    sums = [(a, b) for a in range(10, 50) for b in range(1, 10)]
    if not 1 <= num_eval <= len(sums) // 2:
        raise ValueError(f"num_eval={num_eval} must be between 1 and {len(sums) // 2}, half of the problems.")
    random.Random(seed).shuffle(sums)
    examples = f"2 + 6 = 8{eos_token}\n15 + 3 = 18{eos_token}\n"
    problems = [{"prompt": f"{examples}{a} + {b} =", "answer": str(a + b)} for a, b in sums]
    return problems[num_eval:], problems[:num_eval]


def exact_sum(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """Reward 1 for a completion that is the answer and nothing else, 0 otherwise."""
    return [float(text.strip(" ") == expected) for text, expected in zip(completions, answer, strict=True)]
