"""
Benchmarks of lm-evaluation-harness, which provides problems, prompts and scoring. Our samplers complete the prompts,
so the scores are those of the deployed policy.

Sampling options are the sampler's. A task's own (mostly greedy decoding) are not used, except for its stop texts.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from .scores import Sampler, cut_at, encode, is_right


# Preset: file in the harness' folder of tasks, metric, filter of completions. GPQA's dataset is gated.
HARNESS_TASKS = {
    "gsm8k": ("gsm8k/gsm8k.yaml", "exact_match", "flexible-extract"),
    "math500": ("minerva_math/minerva_math500.yaml", "math_verify", "none"),
    "aime24": ("aime/aime24.yaml", "exact_match", "none"),
    "aime25": ("aime/aime25.yaml", "exact_match", "none"),
    "gpqa_diamond": ("gpqa/cot_zeroshot/gpqa_diamond_cot_zeroshot.yaml", "exact_match", "flexible-extract"),
}
OWN_TASKS = ("amc", "minerva", "olympiad")
"""Datasets without a task in the harness, each with a file in this folder. The harness' `minerva_math` is MATH, a
different dataset."""


def load_benchmarks(names: Sequence[str]) -> dict[str, Any]:
    """
    Return the harness' tasks, `{name: task}`, for presets, for names of the harness, where a group has several tasks,
    and for task files that end in `.yaml`. `ValueError` is raised for an unknown name, a task with log-probs instead
    of completions, and without lm-eval; `OSError` if the Hub is needed and does not answer.
    """
    try:
        from lm_eval import tasks as harness
    except ImportError as error:
        raise ValueError(f'--tasks needs lm-evaluation-harness: `pip install "trl-qarl[eval]"` ({error}).') from error

    folder = Path(harness.__file__).parent
    others = [name for name in names if name not in HARNESS_TASKS and name not in OWN_TASKS]
    # Reading the names of all tasks takes seconds.
    manager = harness.TaskManager(include_defaults=not all(name.endswith(".yaml") for name in others))
    for name in others:
        if not (Path(name).is_file() if name.endswith(".yaml") else name in manager.all_tasks):
            raise ValueError(
                f"--tasks {name}: no such {'file' if name.endswith('.yaml') else 'task'}. Choose from "
                f"{', '.join([*HARNESS_TASKS, *OWN_TASKS])}, the names of `lm-eval ls tasks`, and task files that end in .yaml."
            )
    # GPQA shuffles its choices on loading.
    random.seed(0)
    loaded = {}
    for name in names:
        spec = str(Path(__file__).with_name(f"{name}.yaml")) if name in OWN_TASKS else name
        if name in HARNESS_TASKS:
            spec = str(folder / HARNESS_TASKS[name][0])
        try:
            found = manager.load([spec])["tasks"]
        except (ImportError, AssertionError) as error:
            # Raised by `minerva_math` without the versions of the extra.
            raise ValueError(f'--tasks {name} needs `pip install "trl-qarl[eval]"` ({error}).') from error
        for task_name, task in found.items():
            if task.get_config("output_type") != "generate_until":
                raise ValueError(f"--tasks {name}: {task_name} scores log-probs of given answers, not completions.")
            loaded[name if len(found) == 1 and not name.endswith(".yaml") else task_name] = task
    return loaded


def score_mathematics(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Score a completion for [`OWN_TASKS`] with TRL's `accuracy_reward`; answers may be enclosed in `$`."""
    answer = doc["final_answer"][0] if "final_answer" in doc else doc["answer"]
    return {"exact_match": is_right(results[0], f"${str(answer).strip('$')}$")}


def _make_model(sampler: Sampler, tokenizer, seed: int, chat: bool):
    from lm_eval.api.model import LM

    class DeployedPolicy(LM):
        tokenizer_name = str(tokenizer.name_or_path)

        def generate_until(self, requests):
            texts, groups = [""] * len(requests), {}
            for index, request in enumerate(requests):
                until = request.args[1].get("until") or []
                groups.setdefault((until,) if isinstance(until, str) else tuple(until), []).append(index)
            for stop, indices in groups.items():
                prompts = [encode(tokenizer, requests[index].args[0], templated=chat) for index in indices]
                for index, text in zip(indices, sampler(prompts, seed, stop), strict=True):
                    texts[index] = cut_at(text, stop)
            return texts

        def apply_chat_template(self, chat_history, add_generation_prompt=True):
            return tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )

        def loglikelihood(self, requests):
            raise NotImplementedError("Only completions are sampled.")

        loglikelihood_rolling = loglikelihood

    return DeployedPolicy()


def evaluate_benchmarks(
    sampler: Sampler,
    tokenizer,
    tasks: dict[str, Any],
    num_samples: int,
    seed: int,
    chat: bool,
    limit: int | None = None,
) -> dict[str, list[float]]:
    """
    Return the share of correct completions among `num_samples` of each problem, for each task of [`load_benchmarks`].

    The harness runs once for each sample, with consecutive seeds, because it reduces its own repetitions to the first.
    With `chat`, prompts and the examples in them go through the chat template; `limit` selects the first problems of
    each task.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    runs = []
    for sample in range(num_samples):
        result = simple_evaluate(
            model=_make_model(sampler, tokenizer, seed + sample, chat),
            tasks=list(tasks.values()),
            task_manager=TaskManager(include_defaults=False),
            apply_chat_template=chat,
            limit=limit,
            bootstrap_iters=0,
        )
        runs.append({name: _task_scores(name, result["samples"][task.task_name]) for name, task in tasks.items()})
    return {name: [fmean(scores) for scores in zip(*(run[name] for run in runs), strict=True)] for name in tasks}


def _task_scores(name: str, rows: list[dict[str, Any]]) -> list[float]:
    # A task that is not a preset counts by its first metric and last filter.
    _, metric, chosen = HARNESS_TASKS.get(name, (None, rows[0]["metrics"][0], rows[-1]["filter"]))
    rows = sorted((row for row in rows if row["filter"] == chosen), key=lambda row: row["doc_id"])
    return [float(row[metric]) for row in rows]
