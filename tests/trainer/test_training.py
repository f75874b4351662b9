"""
One tester for trainings: a table of schemes, objectives, optimizers, kinds of rollout and adapters, each at least
once, and what holds for every row. Rollouts are the learner's own; `rollout/test_vllm_plans.py` has those of vLLM,
`distributed/test_shards.py` two processes.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from testing_utils import ADAPTED_PLAN, make_tiny_model, save_at
from testing_utils.releases import make_release
from testing_utils.trainings import EXPERTS, SIGNED, assert_equal, lora, parameters, rows, without_times
from testing_utils.trainings import make as make_trainer
from trl_qarl.checkpoint.layout import iter_checkpoint_tensors
from trl_qarl.checkpoint.scales import keep_scales
from trl_qarl.objectives.registry import OBJECTIVES
from trl_qarl.quantization.schemes import SCHEMES
from trl_qarl.quantization.swap import disable_quantized_forward, prepare_model, quantized_layers


class Case(NamedTuple):
    """
    A row of the table.

    Args:
        options (`dict`):
            Options of the training beside those of [`TRAINING`], four updates on two generation batches.
        mismatch (`float`):
            Largest mean of a batch's mismatch: 0 where learner and sampler agree in every bit. Up to rounding
            otherwise: batches have other shapes.
        lora (`dict`, *optional*):
            Options of an adapter.
        stop (`int`, *optional*, defaults to 1):
            Update after which a checkpoint is written that another run goes on from: 1 and 3 are inside a batch, 2 is
            at its end.
        has_experts (`bool`, *optional*, defaults to `False`):
            Train a mixture of experts.
        is_release (`bool`, *optional*, defaults to `False`):
            Start from a quantized release, with scales that no scheme chooses.
    """

    options: dict[str, Any]
    mismatch: float = 0.05
    lora: dict[str, Any] | None = None
    stop: int = 1
    has_experts: bool = False
    is_release: bool = False


ENGINE = {"numerics": "engine", "learning_rate": 3e-3}
SOME_LAYERS = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
MERGED = {"lora_mode": "merged", "learning_rate": 1e-2}
PLAN = {"re:.*mlp.*": {"scheme": "w4a16", "group_size": 32}, "re:.*self_attn.*": "w8a8"}

CASES = {
    "w4a16": Case({"beta": 0.1, "optim": "muon"}),
    "a release in w4a16": Case({"beta": 0.1}, is_release=True),
    "w4a16 in float32": Case({"bf16": False, "beta": 0.1}, mismatch=1e-6),
    "w8a16": Case({"scheme": "w8a16", "loss_type": "cispo", "optim": "adamw_torch"}, stop=2),
    "w8a8": Case({"scheme": "w8a8", "loss_type": "dr_grpo", "optim": "adamw_torch_fused"}),
    "fp8": Case({"scheme": "fp8", "steps_per_generation": 1}),
    "w4a8": Case({"scheme": "w4a8", "loss_type": "grpo", "delta": 3.0}, stop=2),
    "w4a8-int8": Case(
        {"scheme": "w4a8-int8", "loss_type": "grpo", "importance_sampling_level": "sequence", **ENGINE}, mismatch=0.0
    ),
    "w3a16": Case(
        {"scheme": "w3a16", "loss_type": "grpo", "importance_sampling_level": "sequence", "optim": "adafactor"}
    ),
    "w2a16": Case({"scheme": "w2a16", "loss_type": "grpo", "importance_sampling_level": "sequence"}),
    "mxfp4a16": Case({"scheme": "mxfp4a16", "loss_type": "vespo"}, stop=2),
    "nvfp4a16": Case({"scheme": "nvfp4a16", "loss_type": "luspo"}, stop=2),
    "bf16": Case({"scheme": "bf16"}),
    "several schemes": Case({"scheme": PLAN, "exclude_modules": ["re:model[.]layers[.]1[.].*"], "group_size": 64}),
    "layers left out": Case(
        {"scheme": "w8a16", "exclude_modules": ("o_proj", "up_proj"), "loss_type": "dapo", "beta": 0.1}
    ),
    # Of a run that is resumed within a batch, nothing has quantized the masters before its first update moves them.
    "rollout only": Case(
        {"quantize_learner": False, "loss_type": "grpo", "beta": 0.1, "bf16": False}, mismatch=1.0, stop=2
    ),
    "engine numerics, bf16": Case(ENGINE | {"scheme": "bf16", "loss_type": "bnpo", "beta": 0.1}, mismatch=0),
    "engine numerics, w4a16": Case(ENGINE | {"temperature": 0.7}, mismatch=0, stop=2),
    "4 bits, then 3": Case(
        ENGINE | {"scheme": SIGNED[4], "precisions": {0: 4, 2: 3}, "beta": 0.1}, mismatch=0, stop=3
    ),
    **{
        f"experts, {scheme}": Case({"scheme": scheme, "router_aux_loss_coef": 0.01}, has_experts=True)
        for scheme in ("w4a16", "w8a8", "fp8")
    },
    "LoRA": Case({"loss_type": "sapo", "beta": 0.1}, lora={"use_rslora": True}, stop=2),
    "LoRA, other formats": Case({"scheme": ADAPTED_PLAN}, lora={}, stop=2),
    "LoRA, engine numerics": Case(ENGINE, mismatch=0, lora=SOME_LAYERS),
    "merged LoRA": Case(MERGED | {"beta": 0.1}, lora=SOME_LAYERS, stop=2),
    "merged LoRA, other formats": Case(MERGED | {"scheme": ADAPTED_PLAN}, lora={}),
    "merged LoRA, engine numerics": Case(MERGED | ENGINE | {"scheme": "w8a8"}, mismatch=0, lora=SOME_LAYERS),
}


def test_every_scheme_objective_and_kind_of_adapter_has_a_row():
    options = [case.options for case in CASES.values()]
    assert {*SCHEMES} <= {o.get("scheme", "w4a16") for o in options if not isinstance(o.get("scheme"), dict)}
    assert {*OBJECTIVES} == {o.get("loss_type", "tbpo") for o in options}
    adapters = {(case.lora is not None, case.options.get("lora_mode"), case.mismatch == 0) for case in CASES.values()}
    assert len(adapters) == 6 and {case.stop for case in CASES.values()} == {1, 2, 3}


class Training(NamedTuple):
    """A training of a row: its trainer with a generation batch of each kind, parameters before it, and its folder."""

    case: Case
    model: str
    trainer: Any
    batches: list[dict[str, Any]]
    before: dict[str, torch.Tensor]
    folder: Path

    @property
    def args(self):
        return self.trainer.args

    @property
    def log(self) -> list[dict[str, Any]]:
        return rows(self.trainer)

    @property
    def moves_codes(self) -> bool:
        return self.args.is_quantized and (self.case.lora is None or self.args.lora_mode == "merged")


# Each kind of layer, adapter and numerics; the others when there is time for more than these.
QUICK = ("w4a16", "w8a8", "fp8", "several schemes", "rollout only", "engine numerics, w4a16", "LoRA", "merged LoRA")
QUICK += ("a release in w4a16", "experts, w4a16", "experts, w8a8", "experts, fp8")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, case in CASES.items()
    ],
)
def training(request, tiny_model, tmp_path_factory):
    case, folder = request.param, tmp_path_factory.mktemp("training")
    if case.has_experts:
        tiny_model = make_tiny_model(folder, "qwen3_moe", **EXPERTS)
    if case.is_release:
        tiny_model = make_release(tiny_model, folder / "release")
    trainer = make(case, tiny_model, folder / "whole", [save_at(case.stop)])
    batches, generate = [], trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: batches.append(generate(inputs)) or batches[-1]
    before = parameters(trainer)
    trainer.train()
    return Training(case, tiny_model, trainer, batches, before, folder)


def make(case, model, folder, callbacks=None):
    """The trainer of a row."""
    peft_config = None if case.lora is None else lora(**case.lora)
    return make_trainer(model, folder, callbacks=callbacks, peft_config=peft_config, **case.options)


def test_every_update_has_a_loss_and_every_batch_a_gradient(training):
    assert len(training.log) == 4 and len(training.batches) == 4 // training.args.steps_per_generation
    assert all(math.isfinite(row["loss"] + row["grad_norm"]) for row in training.log)
    # An objective may clip or drop everything in a second update of a batch, never in the first.
    assert all(row["grad_norm"] > 0 for row in training.log if "reward" in row)


def test_a_batch_logs_rewards_speed_and_faults(training):
    first = training.log[0]
    names = ["reward", "rollout/repetition_share", "rollout/garbled_share", "rollout/error_token_share"]
    if training.args.loss_type == "tbpo":
        names += ["entropy", "tbpo/ratio/mean", "tbpo/dropped/total"]
    assert all(math.isfinite(first[name]) for name in names)
    assert first["rollout/tokens_per_second"] > 0 and first["rollout/mean_length"] > 0


def test_each_batch_has_one_mismatch(training):
    parts = ("mismatch/k3", "mismatch/abs_logp_mean/positive", "mismatch/abs_logp_mean/q4")
    assert all(math.isfinite(training.log[0][name]) for name in parts)
    assert sum("mismatch/abs_logp_mean" in row for row in training.log) == len(training.batches)


def test_learner_and_sampler_agree(training):
    found = [row for row in training.log if "mismatch/abs_logp_mean" in row]
    means = [row["mismatch/abs_logp_mean"] for row in found]
    if training.case.mismatch == 0:
        assert {row["mismatch/abs_logp_max"] for row in found} == {0.0}
    else:
        assert max(means) < training.case.mismatch
        # Learner and sampler have other weights, or sums in another order.
        assert training.args.quantize_learner or min(means) > 1e-3


def test_bits_are_logged_where_they_change(training):
    bits = [row["quant/bits"] for row in training.log if "quant/bits" in row]
    assert bits == ([4.0, 3.0] if training.args.precisions else [])
    assert sum("reward/4_bits" in row for row in training.log) == bool(training.args.precisions)


def test_the_reference_is_the_start_in_the_same_precision(training):
    args, first, last = training.args, training.log[0], training.log[-1]
    if not args.beta:
        assert "kl" not in first
        return
    bound = 0 if training.case.mismatch == 0 else 1e-7 if args.bf16 is False else 1e-4
    assert first["kl"] == pytest.approx(0, abs=bound) and last["kl"] > first["kl"]
    if training.case.lora is None:
        quantized = quantized_layers(training.trainer.ref_model)
        assert list(quantized) == (list(training.trainer.swap_report.converted) if args.quantize_learner else [])


def test_code_flips_are_logged_where_masters_have_codes(training):
    first, last = training.log[0], training.log[-1]
    assert ("quant/code_flip_rate" in last) == training.moves_codes
    if not training.moves_codes:
        return
    assert 0 < last["quant/code_flip_rate"] < 1 and last["quant/update_to_step"] > 0
    if training.case.is_release:
        # Its masters have no error.
        assert first["quant/sqnr"] is None
    else:
        # Each bit is worth some 6 dB, and 2 bits have 5 to 7 here.
        assert (4 if training.args.plan.name.startswith("w2") else 10) < first["quant/sqnr"] < 60


def test_experts_are_counted_and_have_a_loss_of_balance(training):
    has_experts = training.case.has_experts
    assert ("aux_loss" in training.log[-1]) == has_experts
    experts = {f"model.layers.{index}.mlp.experts": 4 for index in (0, 1)}
    assert training.trainer.swap_report.num_experts == (experts if has_experts else {})


def test_what_is_trained_moves_and_nothing_else(training):
    for name, p in training.trainer.model.named_parameters():
        if not p.requires_grad:
            assert torch.equal(p, training.before[name]), name
            continue
        assert p.dtype is torch.float32 and p.isfinite().all(), name
        assert p.ndim < 2 or not torch.equal(p, training.before[name]), name


def test_a_model_made_of_the_saved_masters_computes_the_same(training, tmp_path):
    if training.case.lora is not None:
        pytest.skip("adapters are saved without masters")
    trainer, fresh = training.trainer, remake(training, tmp_path)
    model, tokens = trainer.model.eval(), torch.arange(4, 28).view(2, 12)
    trainer.policy.attach_numerics(fresh)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=training.args.bf16):
        # accelerate has wrapped the trainer's.
        assert torch.equal(model(tokens).logits.float(), fresh.eval()(tokens).logits.float())


def test_an_export_holds_what_a_publication_sends(training, tmp_path):
    trainer, exported = training.trainer, {}
    for path in trainer.export_model(tmp_path / "export").glob("*.safetensors"):
        exported |= load_file(path)
    model = trainer.model.eval() if training.case.lora is not None else remake(training, tmp_path)
    published = dict(iter_checkpoint_tensors(model, trainer.policy.dtype))
    assert exported.keys() == published.keys() and len(quantized_layers(model)) == len(trainer.swap_report.converted)
    for name, tensor in published.items():
        assert torch.equal(exported[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def remake(training, folder):
    """The policy, made of the masters that its trainer saves."""
    trainer = training.trainer
    trainer.save_model(str(folder / "masters"))
    assert json.loads((folder / "masters" / "qarl.json").read_text()) == trainer.policy.record()
    fresh = AutoModelForCausalLM.from_pretrained(folder / "masters", dtype=torch.float32)
    keep_scales(fresh, folder / "masters")
    assert_equal(dict(fresh.named_parameters()), parameters(trainer))
    plan, excluded = trainer.swap_report.plan, training.args.exclude_modules
    prepare_model(fresh, plan, exclude_modules=excluded, scale_dtype=trainer.policy.dtype)
    if not training.args.quantize_learner:
        disable_quantized_forward(fresh)
    return fresh


def test_a_run_that_goes_on_from_a_checkpoint_is_the_same(training, tmp_path):
    case, checkpoint = training.case, training.folder / "whole" / f"checkpoint-{training.case.stop}"
    resumed = make(case, training.model, tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert_equal(parameters(training.trainer), parameters(resumed))
    # The first code-flip rate after a resume compares with the resumed weights, which is the same comparison.
    for expected, actual in zip(training.log[case.stop :], rows(resumed)[case.stop :], strict=True):
        assert without_times(actual) == without_times(expected)
    if case.lora is None:
        # The best model is that of its checkpoint.
        resumed.state.best_model_checkpoint = str(checkpoint)
        resumed._load_best_model()
        best = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        assert_equal(dict(best.named_parameters()), parameters(resumed))
