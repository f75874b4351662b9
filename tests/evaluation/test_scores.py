import math

import pytest
from transformers import AutoTokenizer

from trl_qarl.evaluation import scores as evaluation


def test_every_sample_has_a_seed_of_its_own_and_counts(tiny_model):
    model, tokenizer = evaluation.load_policy(tiny_model)
    sampler = evaluation.make_transformers_sampler(model, tokenizer, max_new_tokens=8, temperature=1.0, batch_size=2)
    prompts = ["x", "x", "yyyy"]
    tokens = [evaluation.encode(tokenizer, prompt) for prompt in prompts]
    first, second = sampler(tokens, 0, ()), sampler(tokens, 1, ())
    assert first == sampler(tokens, 0, ()) and len({*first[:2], *second[:2]}) == 4
    problems = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, first, strict=True)]
    scores = evaluation.evaluate_problems(sampler, tokenizer, problems, 2, 0, "exact")
    # Empty completions aside, the second sample is another one.
    assert scores == [(1 + (a.strip() == b.strip())) / 2 for a, b in zip(first, second, strict=True)]
    assert min(scores) == 0.5


def test_messages_go_through_the_chat_template(tiny_model):
    tokenizer, seen = AutoTokenizer.from_pretrained(tiny_model), []

    def sampler(prompts, seed, stop):
        seen.extend(map(tokenizer.decode, prompts))
        return [r"The answer is $\boxed{0.5}$.", "unsure"]

    problems = [
        {"prompt": [{"role": "user", "content": "1/2?"}], "answer": "$\\frac{1}{2}$"},
        {"prompt": "2", "answer": "$2$"},
    ]
    pytest.importorskip("math_verify")
    assert evaluation.evaluate_problems(sampler, tokenizer, problems, 1, 0, "math") == [1.0, 0.0]
    assert seen == ["<|im_start|>user\n1/2?<|im_end|>\n<|im_start|>assistant\n", "2"]


def test_standard_errors():
    mean, error = evaluation.mean_and_error([1.0, 0.0, 1.0, 1.0])
    assert mean == 0.75 and math.isclose(error, 0.25)
    assert evaluation.mean_and_error([1.0]) == (1.0, None)
