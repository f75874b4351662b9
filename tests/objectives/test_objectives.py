import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from reference.objectives_naive import TEMPERATURES, naive_objective
from testing_utils.batches import make_batch
from trl_qarl.forward import Batch
from trl_qarl.objectives.others import MAX_RATIO, acr_loss, dppo_tv_loss
from trl_qarl.objectives.presets import Preset
from trl_qarl.objectives.ratios import geometric_mask, kpop_weight, mismatch_ratio
from trl_qarl.objectives.registry import OBJECTIVES, all_objectives, find_objective
from trl_qarl.qarl_trainer import QaRLTrainer


SAPO_TEMPERATURES = {"sapo_temperature_pos": TEMPERATURES[0], "sapo_temperature_neg": TEMPERATURES[1]}
CLIP = {"epsilon": 0.2, "epsilon_high": 0.28, "delta": 3.0, "clip_max": 2.0}
PRESETS = [name for name, objective in all_objectives().items() if isinstance(objective, Preset)]
OURS = [name for name in PRESETS if find_objective(name).weighs_by_sampler]
OWN_BOUNDS = {"icepop": (0.7, 1.5), "geo-mask": (0.9, 1.2), "kpop": 0.002, "dppo-tv": 0.02}


def own_options(objective):
    bounds = OWN_BOUNDS.get(objective)
    low, high = bounds if isinstance(bounds, tuple) else (None, None)
    return {
        "mismatch_low": low,
        "mismatch_high": high,
        "divergence_threshold": bounds if isinstance(bounds, float) else None,
    }


def make_trainer(objective, use_vllm, per_token_logps):
    """A trainer without model and data: what TRL's `_compute_loss` reads, with log-probs that are given."""
    trainer = QaRLTrainer.__new__(QaRLTrainer)
    known = find_objective(objective)
    entropies = torch.zeros_like(per_token_logps)
    vars(trainer).update(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (per_token_logps, entropies, None),
        _objective=known,
        recorder=SimpleNamespace(
            observe_update=lambda *args: None,
            log=lambda values: None,
            masked_mean=lambda values, mask: 0.0,
            reduce=lambda metrics: {},
        ),
        _score=lambda *args, **kwargs: (per_token_logps, entropies, None),
        _forward_logps=per_token_logps.detach(),
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(
            objective=objective,
            delta=CLIP["delta"] if objective == "dual-clip" else None,
            use_vllm=use_vllm,
            epsilon=CLIP["epsilon"],
            epsilon_high=CLIP["epsilon_high"],
            vllm_importance_sampling_correction=known.options.get("vllm_importance_sampling_correction", False),
            vllm_importance_sampling_mode=known.options.get("vllm_importance_sampling_mode"),
            vllm_importance_sampling_clip_min=None,
            vllm_importance_sampling_clip_max=CLIP["clip_max"],
            **own_options(objective),
            **SAPO_TEMPERATURES,
        ),
        epsilon_low=CLIP["epsilon"],
        epsilon_high=CLIP["epsilon_high"],
        importance_sampling_level=known.options.get("importance_sampling_level", "token"),
        loss_type=known.loss_type,
        beta=0.0,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=use_vllm,
        vllm_importance_sampling_correction=known.options.get("vllm_importance_sampling_correction", False),
        aux_loss_enabled=False,
        is_deepspeed_enabled=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(reduce=lambda tensor, reduction: tensor, gather=lambda tensor: tensor),
        _metrics={"train": defaultdict(list)},
    )
    return trainer


def loss_and_gradient(objective, batch, use_vllm=False):
    logps = batch["logps"].clone().requires_grad_()
    trainer = make_trainer(objective, use_vllm, logps)
    ids = torch.zeros_like(batch["mask"])
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": batch["mask"],
        "advantages": batch["advantages"],
        "old_per_token_logps": batch["old"],
        "sampling_per_token_logps": batch["sampling"],
    }
    if trainer.vllm_importance_sampling_correction:
        mode = trainer.args.vllm_importance_sampling_mode
        inputs["importance_sampling_ratio"] = mismatch_ratio(
            batch["old"], batch["sampling"], batch["mask"], mode, None, CLIP["clip_max"]
        )
    else:
        weight = trainer._objective.weight(trainer.args, Batch.of(inputs))
        inputs |= {} if weight is None else {"importance_sampling_ratio": weight}
    loss = trainer._compute_loss(None, inputs)
    loss.backward()
    return loss.detach(), logps.grad


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("objective", [*PRESETS, "sapo"])
@pytest.mark.parametrize("use_vllm", [True, False])
def test_value_and_gradient_equal_the_naive_objective_whoever_applies_the_weight(objective, use_vllm, seed):
    batch = make_batch(seed)
    loss, gradient = loss_and_gradient(objective, batch, use_vllm)
    tensors = (batch[name].tolist() for name in ("logps", "old", "sampling", "advantages", "mask"))
    expected, expected_gradient = naive_objective(objective, *tensors, **CLIP, **OWN_BOUNDS)
    # Sums of some 150 terms in float64.
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(gradient, torch.tensor(expected_gradient, dtype=torch.float64), rtol=1e-12, atol=1e-15)
    assert gradient.any()


@pytest.mark.parametrize("objective", OURS)
def test_batches_of_the_reference_reach_both_sides_of_every_bound(objective):
    batch = make_batch(0)
    gradient = loss_and_gradient(objective, batch)[1]
    counts = (batch["mask"] != 0) & (batch["advantages"] != 0).unsqueeze(1)
    assert 0.05 < (gradient[counts] == 0).double().mean() < 0.95


@pytest.mark.parametrize("weight", ["icepop", "kpop", "geo-mask", "dppo-tv", "acr"])
def test_what_cannot_be_represented_is_dropped_and_makes_no_nan(weight):
    """Log-probs a hundred nats apart, in float32, where `exp` overflows."""
    old, sampling = torch.tensor([[-1.0, -0.01]]), torch.tensor([[-200.0, -0.01]])
    mask, advantages = torch.ones(1, 2, dtype=torch.long), torch.ones(1)
    logps = old.clone().requires_grad_()
    batch = Batch(old, sampling, advantages, mask, logps)
    if weight == "dppo-tv":
        loss, dropped = dppo_tv_loss(batch, 0.2)
        assert dropped.tolist() == [[True, False]]
    elif weight == "acr":
        loss, dropped = acr_loss(batch, 0.2, 0.2, 2.0)
        assert not dropped.any()
    else:
        of_tokens = {
            "icepop": lambda: mismatch_ratio(old, sampling, mask, "token_mask", 0.5, 5.0),
            "kpop": lambda: kpop_weight(old, sampling, mask, 0.1),
            "geo-mask": lambda: geometric_mask(old, sampling, mask, 0.99, 1.01),
        }[weight]()
        assert of_tokens.tolist() == ([[0.0]] if weight == "geo-mask" else [[0.0, 1.0]])
        loss = (of_tokens * logps).sum()
    loss.backward()
    assert loss.isfinite() and logps.grad.isfinite().all()


@pytest.mark.parametrize(
    ("loss", "level", "positive", "negative"),
    [
        ("luspo", "token", (None, 1.3), (0.8, 4.0)),
        ("luspo", "sequence", (None, 1.3), (0.8, 4.0)),
        ("cispo", "token", (None, 0.3), (None, 0.3)),
        ("cispo", "sequence", (None, 0.3), (None, 0.3)),
        ("vespo", "token", (None, None), (None, None)),
    ],
)
def test_bounds_of_trls_losses_stand_at_their_level(loss, level, positive, negative):
    config = SimpleNamespace(
        objective=loss,
        loss_type=loss,
        importance_sampling_level=level,
        epsilon=0.2,
        epsilon_high=0.3,
        delta=4.0,
        use_vllm=False,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode="sequence_mask",
    )
    bounds = find_objective(loss).histogram_bounds(config)
    of_tokens, of_sequences = ({s: pair for n, s, pair in bounds if n == name} for name in ("token_ratio", "ratio"))
    expected, none = {"positive": positive, "negative": negative}, {"positive": (None, None), "negative": (None, None)}
    assert (of_tokens, of_sequences) == ((expected, {}) if level == "token" else (none, expected))


def test_ratio_to_the_sampler_that_weighs_a_token_of_dppo_is_bounded():
    logps = torch.tensor([[-5.0]], requires_grad=True)
    batch = Batch(torch.tensor([[-5.0]]), torch.tensor([[-12.0]]), torch.ones(1), torch.ones(1, 1), logps)
    loss, dropped = dppo_tv_loss(batch, 0.2)
    loss.backward()
    assert not dropped.any() and logps.grad.item() == pytest.approx(-MAX_RATIO)


def test_acr_widens_the_upper_clip_only_where_the_weight_was_truncated():
    old = torch.zeros(1, 2)
    sampling = torch.tensor([[-math.log(4.0), -math.log(1.5)]])
    logps = torch.full((1, 2), math.log(1.8)).requires_grad_()
    batch = Batch(old, sampling, torch.ones(1), torch.ones(1, 2), logps)
    loss, dropped = acr_loss(batch, 0.2, 0.2, 2.0)
    loss.backward()
    # 1.8 is below 1.2 * 4 / 2 and above 1.2.
    assert dropped.tolist() == [[False, True]] and logps.grad[0, 0] < 0 and logps.grad[0, 1] == 0


def test_names_are_those_of_the_objects_in_the_same_order():
    assert tuple(all_objectives()) == OBJECTIVES
    assert all(objective.name == name for name, objective in all_objectives().items())
