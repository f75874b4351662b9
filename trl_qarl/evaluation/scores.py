"""
Share of problems that a policy solves, over several samples of each: pass@1 with its standard error. Completions come
from transformers, or from vLLM with the kernels of rollouts.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


Sampler = Callable[[list[list[int]], int, Sequence[str]], list[str]]
"""Function of prompts as token ids, a seed and stop texts, which returns one completion for each prompt."""


def load_problems(path: str | Path, scoring: str = "math") -> list[dict[str, Any]]:
    """
    Read problems, `{"prompt", "answer"}`, from a JSON Lines file with an object on each line: `prompt`, a text or a
    list of messages, and `answer` or `solution`, a text.

    With `scoring="math"` answers are for [`trl.rewards.accuracy_reward`]; with `"exact"` a completion must equal the
    answer, except for space around it. `ValueError` names a line that is not JSON, lacks an entry, or has an answer
    that is not mathematics.
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
        row = row if isinstance(row, dict) else {}
        prompt, answer = row.get("prompt"), row.get("answer")
        answer = row.get("solution") if answer is None else answer
        if not isinstance(prompt, (str, list)) or not prompt:
            raise ValueError(f"{where} has no `prompt`, which must be a text or a list of messages.")
        if not isinstance(answer, str):
            raise ValueError(f"{where} has no `answer` and no `solution`, which must be a text.")
        if scoring == "math" and _accuracy("", answer) is None:
            raise ValueError(f"{where}: {answer!r} cannot be read as mathematics. Use `--score exact`.")
        problems.append({"prompt": prompt, "answer": answer})
    if not problems:
        raise ValueError(f"{path} holds no problem.")
    return problems


def is_right(completion: str, answer: str, scoring: str = "math") -> float:
    """Return 1 if a completion has the right answer, else 0; see [`load_problems`]."""
    if scoring == "exact":
        return float(completion.strip() == answer.strip())
    return _accuracy(completion, answer) or 0.0


def _accuracy(completion: str, answer: str) -> float | None:
    from trl.rewards import accuracy_reward

    return accuracy_reward([[{"content": completion}]], [answer])[0]


def encode(tokenizer, text: str, templated: bool = False) -> list[int]:
    """Return the tokens of a prompt as in training: with special tokens unless the chat template has added them."""
    return tokenizer(text, add_special_tokens=not templated)["input_ids"]


def cut_at(text: str, stop: Sequence[str]) -> str:
    """Return the part of a text before the first of the texts in `stop`."""
    return text[: min((text.find(end) for end in stop if end and end in text), default=len(text))]


def evaluate_problems(
    sampler: Sampler, tokenizer, problems: Sequence[dict[str, Any]], num_samples: int, seed: int, scoring: str
) -> list[float]:
    """Return the share of correct completions among `num_samples` for each of [`load_problems`]."""
    prompts = []
    for problem in problems:
        prompt, templated = problem["prompt"], isinstance(problem["prompt"], list)
        if templated:
            prompt = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        prompts.append(encode(tokenizer, prompt, templated))
    sums = [0.0] * len(problems)
    for sample in range(num_samples):
        for index, completion in enumerate(sampler(prompts, seed + sample, ())):
            sums[index] += is_right(completion, problems[index]["answer"], scoring)
    return [total / num_samples for total in sums]


def load_policy(path: str):
    """Return a model in its deployed form, on the accelerator if there is one, and its tokenizer."""
    import torch
    from transformers import AutoTokenizer

    from ..checkpoint.load import load_deployed

    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    return load_deployed(path).to(device), tokenizer


def make_transformers_sampler(
    model, tokenizer, *, max_new_tokens: int, temperature: float = 0.0, top_p: float = 1.0, batch_size: int = 16
) -> Sampler:
    import torch

    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0} if temperature else {}

    def sample(prompts: list[list[int]], seed: int, stop: Sequence[str]) -> list[str]:
        torch.manual_seed(seed)
        texts = []
        ends = {"stop_strings": list(stop), "tokenizer": tokenizer} if stop else {}
        for start in range(0, len(prompts), batch_size):
            batch = {"input_ids": prompts[start : start + batch_size]}
            inputs = tokenizer.pad(batch, return_tensors="pt").to(model.device)
            with torch.no_grad():
                tokens = model.generate(
                    **inputs,
                    **({"do_sample": False} | sampling),
                    **ends,
                    max_new_tokens=max_new_tokens,
                    pad_token_id=tokenizer.pad_token_id,
                )
            texts += tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return texts

    return sample


def make_vllm_sampler(path: str, *, max_new_tokens: int, temperature: float, top_p: float, max_model_len: int | None):
    """Return a sampler over an export in vLLM, its tokenizer, and a function that ends the engine."""
    import torch

    from ..rollout.in_process import InProcessEngine, load_engine

    llm = load_engine(path, **({"max_model_len": max_model_len} if max_model_len else {}))
    engine, tokenizer = InProcessEngine(llm), llm.get_tokenizer()
    on_cpu = llm.llm_engine.vllm_config.device_config.device_type == "cpu"
    sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_new_tokens}

    def sample(prompts: list[list[int]], seed: int, stop: Sequence[str]) -> list[str]:
        # With a seed per prompt, equal prompts differ and runs are repeatable. On a CPU vLLM crashes on seeds if a
        # prompt is prefilled in pieces ("CPU Generator does not use offset"); there the worker uses this process'
        # generator.
        if on_cpu:
            torch.manual_seed(seed)
        seeds = None if on_cpu else [seed * len(prompts) + index for index in range(len(prompts))]
        # Decoded as in transformers: vLLM's incremental decoding leaves out bytes that are not text yet.
        completion_ids = engine.generate(prompts, seeds=seeds, stop=list(stop), **sampling)["completion_ids"]
        return tokenizer.batch_decode(completion_ids, skip_special_tokens=True)

    return sample, tokenizer, engine.close


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean over problems and its standard error, `None` for a single one."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return statistics.fmean(values), error


def add_to_card(folder: str | Path, rows: Sequence[dict[str, Any]], settings: dict[str, Any]) -> bool:
    """
    Write scores to the card of a model, `README.md` in its folder, as metadata of the Hub and as a table; scores of
    other tasks stay. Return whether there is a card. `rows` have `"task"`, `"pass@1"`, a share, and
    `"standard_error"`; `settings` are sampling options.
    """
    from huggingface_hub import EvalResult, ModelCard

    from ..checkpoint.cards import put_evaluation

    path = Path(folder, "README.md")
    if not path.is_file():
        return False
    card = ModelCard.load(path)
    found = {result.dataset_name: result for result in card.data.eval_results or []}
    for row in rows:
        # Without the folder of a file, which is of no interest elsewhere.
        name = Path(row["task"]).name
        found[name] = EvalResult(
            task_type="text-generation",
            dataset_type=name,
            dataset_name=name,
            metric_type="pass@1",
            metric_value=round(100 * row["pass@1"], 2),
            metric_args={**settings, "standard_error": row["standard_error"]},
        )
    card.data.eval_results = list(found.values())
    card.data.model_name = card.data.model_name or Path(folder).name
    lines = ["## Evaluation", "", "| task | pass@1 | samples per problem | temperature |", "|---|---|---|---|"]
    for name, result in found.items():
        options = result.metric_args or {}
        value = format_score(result.metric_value / 100, options.get("standard_error"))
        lines.append(f"| {name} | {value} | {options.get('samples', '')} | {options.get('temperature', '')} |")
    put_evaluation(card, "\n".join(lines))
    card.save(path)
    return True


def format_score(mean: float, error: float | None) -> str:
    """Format a score, such as `"76.0% +- 4.3%"`."""
    return f"{mean:.1%}" + ("" if error is None else f" +- {error:.1%}")
