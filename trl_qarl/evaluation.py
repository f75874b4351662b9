"""
Share of problems that a policy solves, over several samples of each: pass@1 with its standard error.

Completions come from transformers, or from vLLM with the kernels of rollouts ([`~trl_qarl.rollout.engines.load_engine`]).
Problems come from a JSON Lines file.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


__all__ = [
    "compare_scores",
    "evaluate_problems",
    "load_problems",
    "make_transformers_sampler",
    "make_vllm_sampler",
    "mean_and_error",
]

Sampler = Callable[[list[str], int], list[str]]
"""One completion for each prompt, with a seed."""


def load_problems(path: str | Path, scoring: str = "math") -> list[dict[str, Any]]:
    """
    Read problems from a JSON Lines file.

    Args:
        path (`str` or `Path`):
            File with an object on each line: `prompt`, a text or a list of messages, and `answer` or `solution`, a text.
        scoring (`str`, *optional*, defaults to `"math"`):
            `"math"`: [`trl.rewards.accuracy_reward`], `"exact"`: the completion is the answer, but for space around it.

    Returns:
        `{"prompt", "answer"}` of each.

    Raises:
        ValueError: naming the line that is wrong: no JSON, an entry missing, or an answer that is not mathematics.
    """
    problems = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where} is not JSON ({error}).") from error
        prompt = row.get("prompt") if isinstance(row, dict) else None
        answer = row.get("answer", row.get("solution")) if isinstance(row, dict) else None
        if not isinstance(prompt, (str, list)) or not prompt:
            raise ValueError(f"{where} has no `prompt`, which must be a text or a list of messages.")
        if not isinstance(answer, str):
            raise ValueError(f"{where} has no `answer` and no `solution`, which must be a text.")
        if scoring == "math" and _scorer(scoring)("", answer) is None:
            raise ValueError(f"{where}: {answer!r} cannot be read as mathematics. Use `--score exact`.")
        problems.append({"prompt": prompt, "answer": answer})
    if not problems:
        raise ValueError(f"{path} holds no problem.")
    return problems


def _scorer(scoring: str) -> Callable[[str, str], float | None]:
    if scoring == "exact":
        return lambda completion, answer: float(completion.strip() == answer.strip())
    from trl.rewards import accuracy_reward

    return lambda completion, answer: accuracy_reward([[{"content": completion}]], [answer])[0]


def evaluate_problems(
    sampler: Sampler, tokenizer, problems: Sequence[dict[str, Any]], num_samples: int, seed: int, scoring: str
) -> list[float]:
    """Share of `num_samples` completions of each of [`load_problems`] that is right."""
    prompts = [
        tokenizer.apply_chat_template(problem["prompt"], add_generation_prompt=True, tokenize=False)
        if isinstance(problem["prompt"], list)
        else problem["prompt"]
        for problem in problems
    ]
    score, sums = _scorer(scoring), [0.0] * len(problems)
    for sample in range(num_samples):
        for index, completion in enumerate(sampler(prompts, seed + sample)):
            sums[index] += score(completion, problems[index]["answer"]) or 0.0
    return [total / num_samples for total in sums]


def make_transformers_sampler(path: str, *, max_new_tokens: int, temperature: float, top_p: float, batch_size: int):
    """Sampler over transformers, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    if torch.accelerator.is_available():
        model = model.to(torch.accelerator.current_accelerator())
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0} if temperature else {}

    def sample(prompts: list[str], seed: int) -> list[str]:
        torch.manual_seed(seed)
        texts = []
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            inputs = tokenizer(batch, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
            with torch.no_grad():
                tokens = model.generate(
                    **inputs,
                    **({"do_sample": False} | sampling),
                    max_new_tokens=max_new_tokens,
                    pad_token_id=tokenizer.pad_token_id,
                )
            texts += tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return texts

    return sample, tokenizer


def make_vllm_sampler(path: str, *, max_new_tokens: int, temperature: float, top_p: float, max_model_len: int | None):
    """Sampler over an export in vLLM as it is deployed, its tokenizer, and a function that ends the engine."""
    from vllm import SamplingParams

    from .rollout.engines import load_engine

    llm = load_engine(path, **({"max_model_len": max_model_len} if max_model_len else {}))
    tokenizer = llm.get_tokenizer()

    def sample(prompts: list[str], seed: int) -> list[str]:
        inputs = [{"prompt_token_ids": tokenizer(prompt, add_special_tokens=False)["input_ids"]} for prompt in prompts]
        # A seed per prompt: equal prompts differ, and a run repeats itself.
        parameters = [
            SamplingParams(
                temperature=temperature, top_p=top_p, max_tokens=max_new_tokens, seed=seed * len(prompts) + index
            )
            for index in range(len(prompts))
        ]
        # vLLM's incremental decoding leaves out bytes that are no text yet; the tokenizer's is that of transformers.
        outputs = llm.generate(inputs, parameters)
        return tokenizer.batch_decode([output.outputs[0].token_ids for output in outputs], skip_special_tokens=True)

    return sample, tokenizer, llm.llm_engine.engine_core.shutdown


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean over problems and its standard error, `None` for a single one."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return statistics.fmean(values), error


def compare_scores(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float | None]:
    """Mean of `ours - theirs` over the same problems, and its standard error."""
    return mean_and_error([a - b for a, b in zip(ours, theirs, strict=True)])
