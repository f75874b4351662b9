from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from testing_utils import logged, make_tiny_model, make_tiny_tokenizer, make_trainer
from testing_utils.trainings import lora
from trl_qarl.engines.transformers_rollout import OwnGenerationConfig, record_sampling_logps
from trl_qarl.quantization.gemm import has_fast_bf16


def test_the_models_generation_config_is_not_used(tiny_model, tmp_path):
    theirs = {"do_sample": True, "min_p": 0.5, "typical_p": 0.5, "top_k": 2, "suppress_tokens": [5, 6, 7, 8]}
    rollouts = []
    for name, own in (("plain", {}), ("own", theirs)):
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        model.generation_config.update(**own)
        model.save_pretrained(tmp_path / name)
        make_tiny_tokenizer().save_pretrained(tmp_path / name)
        trainer = make_trainer(str(tmp_path / name), tmp_path, bf16=False)
        torch.manual_seed(0)
        rollouts.append(trainer._generate_single_turn([[5, 6, 7]] * 4, None, {}, 1))
        # What is saved for inference stays the model's.
        assert {key: getattr(trainer.model.generation_config, key) for key in own} == own
    assert rollouts[0] == rollouts[1]


def test_the_rollouts_head_runs_in_float32_if_asked(tiny_model, tmp_path):
    options = {"bf16": True, "cast_lm_head_to_fp32": True, "max_steps": 1, "scheme": "bf16"}
    # torch's FlashAttention on a CPU takes exponentials of whole vectors of keys otherwise than of the rest, so that a
    # token's bits depend on how many keys are computed beside its own.
    trainer = make_trainer(tiny_model, tmp_path, model_init_kwargs={"attn_implementation": "eager"}, **options)
    trainer.train()
    if has_fast_bf16():
        # Elsewhere the layers below the head round one row otherwise than many, by 2e-4 nats.
        assert logged(trainer, "mismatch/abs_logp_mean")[0] < 1e-6
    with trainer.accelerator.autocast(), torch.no_grad():
        logits = trainer.model(torch.tensor([[5, 6, 7]])).logits
    assert not torch.equal(logits, logits.bfloat16().float())


def test_a_generate_of_the_instance_comes_back(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    own = model.generate
    model.generate = own
    with record_sampling_logps(model, 1.0) as recorded:
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=3)
    assert vars(model)["generate"] is own and recorded[0].shape == (1, 3)


def test_a_generate_that_draws_by_itself_is_named(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.generate = lambda input_ids, **kwargs: torch.cat([input_ids, input_ids], 1)
    with pytest.raises(TypeError, match="of Qwen2ForCausalLM did not draw"), record_sampling_logps(model, 1.0):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=3)


def test_log_probs_count_tokens_that_trl_suppresses(tiny_model):
    """The placeholders of pictures; here half of the vocabulary."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    given = OwnGenerationConfig(
        max_new_tokens=3, do_sample=True, temperature=1.0, top_k=0, suppress_tokens=[*range(130)]
    )
    with record_sampling_logps(model, 1.0) as recorded, torch.no_grad():
        sequences = model.generate(torch.tensor([[5, 6]]), generation_config=given)
        logps = model(sequences).logits[:, 1:-1].log_softmax(-1)
    assert sequences[0, 2:].min() >= 130
    torch.testing.assert_close(recorded[0], logps.gather(-1, sequences[:, 2:, None])[..., 0])


PROMPTS = torch.tensor([[0, 5, 6], [7, 8, 9], [0, 5, 6], [7, 8, 9], [5, 5, 6], [0, 5, 6]])


@pytest.mark.parametrize("arch", ["qwen2", "gemma2"])
def test_prompts_are_computed_once_for_all_completions(tmp_path, arch):
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, arch), dtype=torch.float32)
    shapes, results = [], []
    model.get_input_embeddings().register_forward_hook(lambda _, args, __: shapes.append([*args[0].shape]))
    given = OwnGenerationConfig(max_new_tokens=4, do_sample=True, temperature=1.0, top_k=0, eos_token_id=None)
    for shares_prompts in (False, True):
        torch.manual_seed(0)
        shapes.clear()
        with record_sampling_logps(model, 1.0, shares_prompts) as recorded, torch.no_grad():
            mask = (PROMPTS > 0).long()
            results.append((model.generate(PROMPTS, attention_mask=mask, generation_config=given), recorded[0]))
        assert shapes == [[3 if shares_prompts else 6, 3], *[[6, 1]] * 3]
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=1e-5)
    assert "_prefill" not in vars(model)


def test_other_inputs_and_caches_are_computed_row_by_row(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, "qwen2"), dtype=torch.float32)
    shapes = []
    model.get_input_embeddings().register_forward_hook(lambda _, args, __: shapes.append(len(args[0])))
    for options in ({"use_cache": False}, {"cache_implementation": "static"}):
        shapes.clear()
        given = OwnGenerationConfig(
            max_new_tokens=2, do_sample=True, temperature=1.0, top_k=0, eos_token_id=None, **options
        )
        with record_sampling_logps(model, 1.0, True), torch.no_grad():
            model.generate(PROMPTS, attention_mask=(PROMPTS > 0).long(), generation_config=given, disable_compile=True)
        assert shapes == [6, 6]


@pytest.mark.parametrize("bf16", [True, False])
def test_a_training_computes_a_prompt_once_per_rollout(tiny_model, tmp_path, bf16):
    trainer = make_trainer(tiny_model, tmp_path, bf16=bf16, max_steps=2)
    sizes, rows, generate = [], [], trainer.model.generate
    trainer.model.get_input_embeddings().register_forward_hook(lambda _, args, __: sizes.append(len(args[0])))

    def generate_and_look(**kwargs):
        sizes.clear()
        sequences = generate(**kwargs)
        rows.append((sizes[0], len(kwargs["input_ids"])))
        return sequences

    trainer.model.generate = generate_and_look
    trainer.train()
    assert rows and all(computed * trainer.args.num_generations == asked for computed, asked in rows)
    assert logged(trainer, "mismatch/abs_logp_mean")[0] < (1e-2 if bf16 else 1e-4)


class OnlyDigits(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


def appending(generate):
    def generate_with_own(*args, **kwargs):
        kwargs["logits_processor"] = [*kwargs.get("logits_processor", ()), OnlyDigits()]
        return generate(*args, **kwargs)

    return generate_with_own


@pytest.mark.parametrize(
    ("bind", "named"),
    [
        (lambda generate: partial(generate, logits_processor=LogitsProcessorList([OnlyDigits()])), "OnlyDigits"),
        (lambda generate: partial(partial(generate, use_cache=True), logits_processor=[OnlyDigits()]), "OnlyDigits"),
        (appending, "OnlyDigits"),
        (lambda generate: partial(generate, top_k=3), "top_k=3 instead of 0"),
        (
            lambda generate: partial(generate, prefix_allowed_tokens_fn=lambda i, ids: [5, 6]),
            "prefix_allowed_tokens_fn",
        ),
        (lambda generate: partial(generate, suppress_tokens=[7]), r"suppress_tokens=\[7\] instead of None"),
    ],
    ids=["partial", "nested", "wrapper", "top_k", "prefix", "suppress"],
)
@pytest.mark.parametrize("has_adapter", [False, True])
def test_a_bound_generate_that_changes_sampling_is_refused(tiny_model, tmp_path, bind, named, has_adapter):
    trainer = make_trainer(tiny_model, tmp_path, bf16=False, **({"peft_config": lora()} if has_adapter else {}))
    trainer.model.generate = bind(trainer.model.generate)
    with pytest.raises(ValueError, match=f"changes the distribution of tokens \\({named}"):
        trainer.train()


def test_a_bound_generate_that_changes_no_sampling_is_used(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, bf16=False, max_steps=1)
    calls, generate = [], trainer.model.generate
    trainer.model.generate = partial(
        lambda *args, **kwargs: calls.append(kwargs) or generate(*args, **kwargs), use_cache=True
    )
    trainer.train()
    assert calls and logged(trainer, "mismatch/abs_logp_mean")[0] < 1e-4
