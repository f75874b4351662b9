"""
Validates completions returned by the engine or by `rollout_func`. A valid HTTP response can still be malformed: it may
lack a completion, or hold tokens that the learner has no embedding for, or log-probs that no token can have.

Only impossible values are refused. A completion that is merely unlikely, or from other weights, is not detected.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any


LARGEST_LOGP = 0.02
"""
A log-prob is at most 0, up to rounding: a float32 sum over a vocabulary of 2**18, in the worst order, has a relative
error of 2**18 * 2**-24 = 0.016, which a log-prob normalized by this sum inherits.
"""

SMALLEST_LOGP = -9999.0
"""Value that vLLM's HTTP API writes for minus infinity, which no sampled token can have."""


class BadAnswer(ValueError):
    """Malformed completions. The message names the completion, the token and the allowed values."""


def vocabulary_size(model) -> int:
    """Return the number of token ids that a model has rows for, from which an engine samples. It may be larger or
    smaller than the tokenizer's."""
    return model.config.get_text_config().vocab_size


def check_answer(
    answer: dict[str, Any], prompts: Sequence[list[int]], num_generations: int, max_tokens: int, vocab_size: int
) -> None:
    """
    Check an engine's completions of `prompts`, token ids. [`BadAnswer`] is raised if they cannot have been sampled.

    `answer` has the form of TRL's client of a server: `prompt_ids`, one list for each prompt; `completion_ids`,
    `logprobs` and `logprob_token_ids`, one list for each completion, those of one prompt side by side. In the last two
    each token has a list that begins with the sampled token. NaN is `None`.
    """
    completion_ids, logprobs, logprob_ids = (
        answer[name] for name in ("completion_ids", "logprobs", "logprob_token_ids")
    )
    wanted = f"{len(prompts)} prompts with {num_generations} completions each"
    _check_count(completion_ids, len(prompts) * num_generations, "completions", wanted)
    _check_count(answer["prompt_ids"], len(prompts), "prompts", wanted)
    for number, (theirs, ours) in enumerate(zip(answer["prompt_ids"], prompts, strict=True)):
        if theirs != ours:
            raise BadAnswer(
                f"prompt {number} of {len(prompts)} comes back as {_brief(theirs)}, but {_brief(ours)} was sent."
            )
    _check_count(logprobs, len(completion_ids), "lists of log-probs", "as many as completions")
    _check_count(logprob_ids, len(completion_ids), "lists of the log-probs' tokens", "as many as completions")
    for number, ids in enumerate(completion_ids):
        where = f"completion {number} of {len(completion_ids)}"
        _check_ids(where, ids, vocab_size)
        if len(ids) > max_tokens:
            raise BadAnswer(f"{where} has {len(ids)} tokens; at most {max_tokens} were asked for.")
        _check_logps(where, ids, _first_of_each(logprobs[number]))
        for position, (token, of) in enumerate(zip(ids, _first_of_each(logprob_ids[number]), strict=True)):
            if token != of:
                raise BadAnswer(
                    f"{where}, token {position} of {len(ids)}: {token} was sampled, but the log-prob is that of token {of}."
                )


def check_rollout(output: dict[str, Any], num_prompts: int, vocab_size: int) -> None:
    """Check the output of a `rollout_func`: `prompt_ids`, `completion_ids` and `logprobs`, one list, tensor or array
    for each prompt. Completions may have any length, as an environment may take several turns. NaN or `None` stands
    for an unknown log-prob. [`BadAnswer`] is raised if the learner cannot be trained on it."""
    wanted = f"one for each of {num_prompts} prompts"
    prompt_ids, completion_ids, logprobs = (output[name] for name in ("prompt_ids", "completion_ids", "logprobs"))
    _check_count(prompt_ids, num_prompts, "prompts", wanted)
    _check_count(completion_ids, num_prompts, "completions", wanted)
    if logprobs is not None:
        _check_count(logprobs, num_prompts, "lists of log-probs", wanted)
    for number in range(num_prompts):
        _check_ids(f"prompt {number} of {num_prompts}", _numbers(prompt_ids[number]), vocab_size)
        where, ids = f"completion {number} of {num_prompts}", _numbers(completion_ids[number])
        _check_ids(where, ids, vocab_size)
        if logprobs is not None:
            _check_logps(where, ids, _numbers(logprobs[number]), may_be_unknown=True)


def checked_rollout_func(
    rollout_func: Callable[..., dict[str, Any]], vocab_size: int
) -> Callable[..., dict[str, Any]]:
    """Return `rollout_func` followed by [`check_rollout`]."""

    @wraps(rollout_func)
    def rollout(prompts, *args, **kwargs):
        output = rollout_func(prompts, *args, **kwargs)
        if not isinstance(output, Mapping):
            raise BadAnswer(
                f"`rollout_func` returned {output!r} of type {type(output).__name__}. Return a dictionary with `prompt_ids`, "
                "`completion_ids` and `logprobs`."
            )
        # TRL raises an error that names missing keys.
        if {"prompt_ids", "completion_ids", "logprobs"} <= output.keys():
            try:
                check_rollout(output, len(prompts), vocab_size)
            except BadAnswer as error:
                raise BadAnswer(f"`rollout_func` returned a result that cannot be trained on: {error}") from None
        return output

    return rollout


def _check_count(rows: Any, expected: int, what: str, wanted: str) -> None:
    if rows is None:
        raise BadAnswer(f"there are no {what}; asked for: {wanted}.")
    if len(rows) != expected:
        raise BadAnswer(f"there are {len(rows)} {what} in place of {expected}; asked for: {wanted}.")


def _check_ids(where: str, ids: Any, vocab_size: int) -> None:
    if not ids:
        raise BadAnswer(f"{where} has no tokens; it needs at least an end-of-sequence token.")
    for position, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise BadAnswer(
                f"{where}, token {position} of {len(ids)}: {token!r} is not a token id of the learner; allowed are the integers "
                f"from 0 to {vocab_size - 1}."
            )


def _check_logps(where: str, ids: Sequence[int], logps: list[Any], may_be_unknown: bool = False) -> None:
    if len(logps) != len(ids):
        raise BadAnswer(f"{where} has {len(logps)} log-probs for {len(ids)} tokens.")
    for position, value in enumerate(logps):
        if type(value) in (float, int) and SMALLEST_LOGP < value <= LARGEST_LOGP:
            continue
        is_unknown = value is None or (type(value) is float and math.isnan(value))
        if is_unknown and may_be_unknown:
            continue
        said = f"vLLM's {SMALLEST_LOGP} for minus infinity" if value == SMALLEST_LOGP else repr(value)
        raise BadAnswer(
            f"{where}, token {position} of {len(ids)}: {'NaN' if is_unknown else said} as the log-prob of token id "
            f"{ids[position]}; allowed are finite numbers that are not above 0 by more than rounding ({LARGEST_LOGP})"
            f"{', and NaN for what is unknown' if may_be_unknown else ''}."
        )


def _first_of_each(positions: Sequence[Sequence[Any]]) -> list[Any]:
    return [position[0] if position else None for position in positions]


def _numbers(row: Any) -> Any:
    """Return a tensor, an array, or a list of their elements or of numbers, as numbers of Python."""
    if hasattr(row, "tolist"):
        return row.tolist()
    return [value.tolist() if hasattr(value, "tolist") else value for value in row]


def _brief(ids: Any) -> str:
    return f"{ids[:8]} and {len(ids) - 8} more" if isinstance(ids, list) and len(ids) > 8 else repr(ids)
