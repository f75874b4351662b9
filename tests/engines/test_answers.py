"""Validation of answers as completions of the prompts that were sent."""

import math
from array import array

import numpy as np
import pytest
import torch

from testing_utils import make_tiny_config
from trl_qarl.engines.answers import BadAnswer, check_answer, check_rollout, checked_rollout_func, vocabulary_size


PROMPTS = [[5, 6, 7], [8]]


def make_answer(prompts=PROMPTS, num_generations=2, length=4):
    """An answer as TRL's client returns it: tokens of every kind of a vocabulary of 260, log-probs as a sampler's."""
    num = len(prompts) * num_generations
    ids = [[0, 259, *range(10 + i, 8 + i + length)][:length] for i in range(num)]
    return {
        "prompt_ids": [list(prompt) for prompt in prompts],
        "completion_ids": ids,
        "logprobs": [[[-0.5 * position - 1e-3] for position in range(length)] for _ in ids],
        "logprob_token_ids": [[[token] for token in row] for row in ids],
    }


def check(answer, prompts=PROMPTS, num_generations=2, max_tokens=4, vocab_size=260):
    check_answer(answer, prompts, num_generations, max_tokens, vocab_size)


def put(name, *place):
    """A function that replaces one entry of an answer by the last of `place`; the others locate the entry."""

    def change(answer):
        *way, last, value = place
        row = answer[name]
        for index in way:
            row = row[index]
        row[last] = value

    return change


def token(value):
    """A token, and its log-prob's."""

    def change(answer):
        answer["completion_ids"][1][2] = value
        answer["logprob_token_ids"][1][2] = [value]

    return change


def logprob(value):
    return put("logprobs", 1, 2, 0, value)


def each(change):
    """A change of all three lists of completions."""

    def change_each(answer):
        for name in ("completion_ids", "logprobs", "logprob_token_ids"):
            change(answer[name])

    return change_each


def other_first(answer):
    answer["logprob_token_ids"][1][2] = [99, answer["completion_ids"][1][2]]


WHERE = "completion 1 of 4, token 2 of 4: "

BAD = {
    "one completion fewer": (each(list.pop), "3 completions in place of 4"),
    "a prompt fewer": (lambda answer: answer["prompt_ids"].pop(), "1 prompts in place of 2"),
    "another prompt": (put("prompt_ids", 1, [9]), r"prompt 1 of 2 comes back as \[9\]"),
    "token just outside": (token(260), f"{WHERE}260 is not"),
    "token below 0": (token(-1), f"{WHERE}-1 is"),
    "token of truth": (token(True), f"{WHERE}True is"),
    "no tokens": (each(lambda rows: rows[3].clear()), "completion 3 of 4 has no tokens"),
    "a token too many": (each(lambda rows: rows[2].append(rows[2][-1])), "completion 2 of 4 has 5 tokens"),
    "log-probs null": (lambda answer: answer.update(logprobs=None), "no lists of log-probs"),
    "log-probs' tokens null": (lambda answer: answer.update(logprob_token_ids=None), "no lists of the log-probs'"),
    "a list of log-probs fewer": (lambda answer: answer["logprobs"].pop(), "3 lists of log-probs in place of 4"),
    "a log-prob fewer": (lambda answer: answer["logprobs"][1].pop(), "completion 1 of 4 has 3 log-probs for 4"),
    "a log-prob more": (lambda answer: answer["completion_ids"][1].pop(), "completion 1 of 4 has 4 log-probs for 3"),
    "no log-prob of a token": (put("logprobs", 1, 2, []), f"{WHERE}NaN"),
    "log-prob NaN, as TRL marks it": (logprob(None), f"{WHERE}NaN"),
    "log-prob NaN": (logprob(math.nan), f"{WHERE}NaN"),
    "log-prob -inf": (logprob(-math.inf), f"{WHERE}-inf"),
    "log-prob -inf, as vLLM writes it": (logprob(-9999.0), rf"{WHERE}vLLM's -9999\.0"),
    "log-prob above rounding": (logprob(0.021), rf"{WHERE}0\.021"),
    "log-prob of text": (logprob("-1.0"), rf"{WHERE}'-1\.0'"),
    "log-prob of another token": (put("logprob_token_ids", 1, 2, 0, 77), f"{WHERE}11 was sampled.* 77"),
    "log-prob of another token first": (other_first, f"{WHERE}11 was sampled.* 99"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_a_senseless_answer_is_refused_with_the_reason(change, message):
    answer = make_answer()
    change(answer)
    with pytest.raises(BadAnswer, match=message):
        check(answer)


@pytest.mark.parametrize(
    ("prompts", "num_generations", "length"), [(PROMPTS, 2, 1), ([[5]], 1, 4), ([[5], [5, 6], [7]], 4, 3)]
)
def test_answers_of_any_size_pass(prompts, num_generations, length):
    check(make_answer(prompts, num_generations, length), prompts, num_generations)


def with_another_log_prob(answer):
    answer["logprobs"][1][2].append(-8.0)
    answer["logprob_token_ids"][1][2].append(99)


@pytest.mark.parametrize(
    "change",
    # Of a token that is certain, with rounding; of one that is as good as impossible; of one that JSON writes without
    # a fraction.
    [*map(logprob, [0.0, 0.016, -5000.0, -3]), with_another_log_prob],
)
def test_log_probs_that_a_sampled_token_can_have_pass(change):
    answer = make_answer()
    change(answer)
    check(answer)


def test_tokens_up_to_the_models_rows_pass():
    config = make_tiny_config("qwen2", vocab_size=320)
    vocab_size = vocabulary_size(type("Model", (), {"config": config}))
    answer = make_answer()
    token(319)(answer)
    check(answer, vocab_size=vocab_size)
    token(320)(answer)
    with pytest.raises(BadAnswer, match="from 0 to 319"):
        check(answer, vocab_size=vocab_size)


def make_rollout(kind=list):
    """Output of a `rollout_func` for two prompts: several turns, any length, tokens of an environment."""
    output = {
        "prompt_ids": [[5, 6], [7]],
        "completion_ids": [[0, 259, 9], list(range(40))],
        "logprobs": [[-1.0, 0.0, -0.5], [-2.0] * 40],
    }
    return {name: [kind(row) for row in rows] for name, rows in output.items()} | {"env_mask": [[1, 0, 1], [1] * 40]}


@pytest.mark.parametrize(
    "kind",
    [list, torch.tensor, lambda row: list(np.array(row)), lambda row: array("i" if type(row[0]) is int else "d", row)],
    ids=["lists", "tensors", "lists of array numbers", "compact arrays"],
)
def test_a_rollout_of_any_kind_of_number_passes(kind):
    check_rollout(make_rollout(kind), 2, 260)


@pytest.mark.parametrize("value", [None, math.nan])
def test_a_rollout_may_have_log_probs_that_are_unknown(value):
    output = make_rollout()
    output["logprobs"][1][3] = value
    check_rollout(output, 2, 260)
    # The trainer says that all are missing.
    check_rollout(output | {"logprobs": None}, 2, 260)


BAD_ROLLOUTS = {
    "a completion fewer": (lambda o: o["completion_ids"].pop(), "1 completions in place of 2"),
    "a prompt more": (lambda o: o["prompt_ids"].append([5]), "3 prompts in place of 2"),
    "a list of log-probs fewer": (lambda o: o["logprobs"].pop(), "1 lists of log-probs in place of 2"),
    "prompt outside": (put("prompt_ids", 1, 0, 260), "prompt 1 of 2, token 0 of 1: 260"),
    "token outside": (put("completion_ids", 1, 7, 260), "completion 1 of 2, token 7 of 40: 260"),
    "tensor of floats": (put("completion_ids", 0, torch.ones(3)), r"completion 0 of 2, token 0 of 3: 1\.0"),
    "a log-prob fewer": (lambda o: o["logprobs"][1].pop(), "completion 1 of 2 has 39 log-probs for 40 tokens"),
    "log-prob inf": (put("logprobs", 0, 1, math.inf), "completion 0 of 2, token 1 of 3: inf"),
}


@pytest.mark.parametrize("output", [None, [], "text"])
def test_a_rollout_that_is_no_dictionary_is_named(output):
    with pytest.raises(BadAnswer, match="`rollout_func` returned .* Return a dictionary with `prompt_ids`"):
        checked_rollout_func(lambda prompts, trainer: output, 260)(["a"], None)


@pytest.mark.parametrize(("change", "message"), BAD_ROLLOUTS.values(), ids=BAD_ROLLOUTS)
def test_a_malformed_rollout_is_refused_with_the_reason(change, message):
    output = make_rollout()
    change(output)
    with pytest.raises(BadAnswer, match=message):
        check_rollout(output, 2, 260)
    rollout_func = checked_rollout_func(lambda prompts, trainer: output, 260)
    with pytest.raises(ValueError, match=f"^`rollout_func`.*{message}"):
        rollout_func(["a", "b"], None)


def test_keys_that_are_missing_are_left_to_trl():
    output = {"completion_ids": []}
    assert checked_rollout_func(lambda prompts, trainer: output, 260)(["a"], None) is output
