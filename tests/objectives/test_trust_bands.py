"""Bands that set themselves: their estimates, the same in every process and after a resume."""

import io
import math

import pytest
import torch

from reference.tbpo_naive import naive_bands, naive_log_ratio, naive_tbpo
from testing_utils.batches import make_batch
from testing_utils.trainings import config, make, parameters, rows
from trl_qarl.objectives.ratios import sequence_log_ratio
from trl_qarl.objectives.tbpo import tbpo_loss
from trl_qarl.objectives.trust_bands import OPEN, Bands, EstimatedBands, estimate_bands


# Generation batches of 16 completions in two updates, of which the second drops half of each sign.
AUTO = {"trust_band": "auto", "trust_band_share": 0.5, "per_device_train_batch_size": 8} | {
    name: getattr(Bands(4e-4, 3e-4, 7e-4), name) for name in Bands._fields
}


AUTO_BAND = {"trust_band": "auto"}


def draw(number, seed=0, spread=0.01):
    generator = torch.Generator().manual_seed(seed)
    log_ratios, advantages = torch.randn(2, number, generator=generator, dtype=torch.float64)
    # As updates do: a positive advantage raises a ratio.
    return spread * (log_ratios + 0.5 * advantages), advantages


def together(tensor):
    return tensor


def observe(bands, log_ratios, advantages, num_parts=1, is_on_policy=False, gather=together):
    for part in torch.arange(len(advantages)).chunk(num_parts):
        bands.observe(log_ratios[part], advantages[part], torch.zeros(len(part), dtype=torch.bool))
    bands.end_update(gather, is_on_policy)


class TestEstimate:
    # Without a push ratios leave the negative band on either side; with one, so many leave it that every quantile is
    # outside 1.
    @pytest.mark.parametrize(("share", "push"), [(0.05, 0.0), (0.25, 0.0), (0.5, 2.0), (0.9, 2.0)])
    def test_bands_and_the_loss_that_they_clip_are_those_of_loops_in_value_and_gradient(self, share, push):
        for seed in range(5):
            batch = make_batch(seed, num_sequences=96)
            # Around 1, and pushed by the sign of the advantage.
            pushed = push * batch["advantages"].sign()[:, None]
            logps = batch["old"] + 0.01 * (batch["logps"] - batch["old"] + pushed)
            arguments = [logps.requires_grad_(), batch["old"], batch["sampling"], batch["advantages"], batch["mask"]]
            log_ratios = sequence_log_ratio(logps, batch["old"], batch["mask"])
            counts = batch["mask"].any(-1)
            bands = estimate_bands(log_ratios[counts], batch["advantages"][counts], share)
            loss, output = tbpo_loss(*arguments, **bands._asdict(), mismatch_cap=2.0)
            loss.backward()

            lists = [tensor.tolist() for tensor in arguments]
            naive = [naive_log_ratio(*row) for row in zip(lists[0], lists[1], lists[4], strict=True)]
            kept = [(x, a) for x, a, mask in zip(naive, lists[3], lists[4], strict=True) if any(mask)]
            expected = naive_bands(*zip(*kept, strict=True), share)
            assert bands == pytest.approx(expected, rel=1e-10)
            expected_loss, gradient, _ = naive_tbpo(*lists, *expected, 2.0)
            assert loss.item() == pytest.approx(expected_loss, rel=1e-10)
            torch.testing.assert_close(logps.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-9, atol=1e-14)
            dropped = output.dropped_positive_high, output.dropped_negative_low | output.dropped_negative_high
            for sign, is_dropped in zip((1, -1), dropped, strict=True):
                of_sign = counts & (batch["advantages"] * sign > 0)
                # A quantile lies between two of them.
                assert is_dropped.sum() == pytest.approx(share * of_sign.sum(), abs=1)

    def test_of_a_sign_with_too_few_completions_nothing_is_dropped(self):
        log_ratios = torch.linspace(-0.1, 0.1, 15)
        bands = estimate_bands(log_ratios, torch.tensor([1.0] * 8 + [-1.0] * 7), 0.25)
        assert math.isfinite(bands.positive_epsilon_high) and bands[1:] == OPEN[1:]
        assert estimate_bands(log_ratios[:0], log_ratios[:0], 0.25) == OPEN

    @pytest.mark.parametrize(("sign", "index"), [(1.0, 0), (-1.0, 2)])
    def test_every_band_includes_the_ratio_1(self, sign, index):
        bands = estimate_bands(torch.full((20,), -0.1), torch.full((20,), sign), 0.25)
        assert bands[index] == (0.0 if sign > 0 else pytest.approx(7 / 3 * (1 - math.exp(-0.1))))
        assert all(offset >= 0 for offset in bands)

    def test_ratios_that_overflow_leave_a_lower_bound_between_0_and_1(self):
        bands = estimate_bands(torch.tensor([-500.0, 500.0] * 20), -torch.ones(40), 0.5)
        assert all(math.isfinite(offset) for offset in bands[1:])
        assert estimate_bands(torch.full((40,), -500.0), -torch.ones(40), 0.5).negative_epsilon_low == 1.0


class TestEstimatedBands:
    def test_they_are_open_until_there_is_something_to_estimate_from(self):
        bands = EstimatedBands(0.25, 64, 8)
        assert bands.bands == OPEN
        observe(bands, torch.zeros(64), torch.ones(64), is_on_policy=True)
        assert bands.bands == OPEN
        observe(bands, *draw(64))
        assert bands.bands == estimate_bands(*draw(64), 0.25) and all(map(math.isfinite, bands.bands))

    @pytest.mark.parametrize(("noise", "is_on_policy"), [(0.0, False), (1e-7, False), (0.0, True), (1e-3, True)])
    def test_updates_in_which_every_ratio_is_1_change_nothing(self, noise, is_on_policy):
        bands = EstimatedBands(0.25, 64, 2)
        observe(bands, *draw(64))
        before = bands.bands
        log_ratios, advantages = draw(64, seed=1)
        observe(bands, log_ratios.sign() * noise, advantages, is_on_policy=is_on_policy)
        assert bands.bands == before

    def test_they_look_back_over_whole_generation_batches(self):
        # Batches of 100 completions in 2 updates: 3 of them have at least 256.
        bands = EstimatedBands(0.25, 100, 2)
        updates = [draw(50, seed, spread=0.01 * (seed + 1)) for seed in range(10)]
        for update in updates:
            observe(bands, *update)
        recent = [torch.cat(part) for part in zip(*updates[-6:], strict=True)]
        assert bands.bands == estimate_bands(*recent, 0.25) != estimate_bands(*updates[-1], 0.25)

    def test_processes_and_micro_batches_do_not_matter(self):
        log_ratios, advantages = draw(64)
        whole = EstimatedBands(0.25, 64, 8)
        observe(whole, log_ratios, advantages)
        processes = [EstimatedBands(0.25, 64, 8) for _ in range(2)]
        parts = [(log_ratios[rank::2], advantages[rank::2]) for rank in range(2)]
        gathered = torch.cat([torch.stack(part, dim=1) for part in parts])
        for process, part in zip(processes, parts, strict=True):
            observe(process, *part, num_parts=4, gather=lambda _: gathered)
        assert processes[0].bands == processes[1].bands == whole.bands

    def test_what_does_not_count_in_the_loss_does_not_count_here(self):
        log_ratios, advantages = draw(64)
        expected = EstimatedBands(0.25, 64, 8)
        observe(expected, log_ratios, advantages)
        bands = EstimatedBands(0.25, 64, 8)
        bands.observe(log_ratios, advantages, torch.zeros(64, dtype=torch.bool))
        far, nan = torch.full((32,), 9.0), torch.full((32,), math.nan)
        bands.observe(far, torch.ones(32), torch.ones(32, dtype=torch.bool))
        bands.observe(far, torch.zeros(32), torch.zeros(32, dtype=torch.bool))
        bands.observe(nan, torch.ones(32), torch.zeros(32, dtype=torch.bool))
        bands.end_update(together, False)
        assert bands.bands == expected.bands

    def test_what_is_saved_goes_on_to_the_same_bits(self):
        bands, file = EstimatedBands(0.25, 100, 2), io.BytesIO()
        for seed in range(5):
            observe(bands, *(tensor.float() for tensor in draw(50, seed)), is_on_policy=seed % 2 == 0)
        torch.save(bands.state(), file)
        # Of a window nothing is kept alive beside it.
        assert file.tell() < 10_000
        file.seek(0)
        resumed = EstimatedBands(0.25, 100, 2)
        resumed.load(torch.load(file, weights_only=True))
        for seed in range(5, 12):
            assert resumed.bands == bands.bands
            for each in (bands, resumed):
                observe(each, *(tensor.float() for tensor in draw(50, seed)))
        assert resumed.bands == bands.bands


def bands_of(trainer):
    names = ("positive_high", "negative_low", "negative_high")
    return [[row.get(f"tbpo/band/{name}") for name in names] for row in rows(trainer)]


@pytest.mark.parametrize("parts", [1, 2])
def test_a_run_sets_its_bands_and_resumes_with_them_to_the_same_weights(tiny_model, tmp_path, parts):
    """With micro-batches too, and with evaluations in between, which are not taken for updates."""
    options = AUTO | {"max_steps": 8, "save_strategy": "steps", "save_steps": 1, "bf16": False, "num_generations": 8}
    options |= {"gradient_accumulation_steps": parts, "steps_per_generation": 2 * parts}
    options |= {"per_device_train_batch_size": 8 // parts}
    whole = make(tiny_model, tmp_path / "whole", **options)
    whole.train()
    # Nothing has moved before the second update ends, and its ratios are looked at when the third begins.
    bands = bands_of(whole)
    assert bands[:2] == [[None] * 3] * 2 and all(offset >= 0 for row in bands[2:] for offset in row)
    # An update on a fresh batch changes nothing.
    assert bands[2] == bands[3] != bands[4] == bands[5] != bands[6] == bands[7]
    assert all(7 * low == pytest.approx(3 * high) and high > 0 for _, low, high in bands[2:])
    window = whole._objective.state()["window"]
    assert [len(update) for update in window] == [0, 8] * 4
    assert bands[6] == pytest.approx(estimate_bands(*torch.cat(window[:6]).unbind(1), 0.5), rel=1e-15)
    dropped = [row["tbpo/dropped/total"] for row in rows(whole)]
    assert dropped[::2] == [0, 0, 0, 0] and dropped[1] == 0 and min(dropped[3], dropped[5], dropped[7]) > 0
    for step in (1, 4, 5):
        checkpoint = tmp_path / "whole" / f"checkpoint-{step}"
        resumed = make(tiny_model, tmp_path / f"from-{step}", **options)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert bands_of(resumed) == bands
        for name, parameter in parameters(whole).items():
            assert torch.equal(parameter, resumed.model.get_parameter(name)), name


@pytest.mark.parametrize(
    ("then", "now", "match"),
    [
        ({}, {"trust_band_share": 0.25}, "trust_band_share=0.5, this run has .*share=0.25"),
        ({}, {"trust_band": "fixed", "trust_band_share": 0.25}, "this run has trust_band='fixed'"),
        ({"trust_band": "fixed", "trust_band_share": 0.25}, {}, "trust_band='fixed', this run has .*'auto'"),
        ({}, {"objective": "gspo"}, "objective='gspo'"),
    ],
)
def test_a_run_is_not_resumed_with_other_bands(tiny_model, tmp_path, then, now, match):
    make(tiny_model, tmp_path, max_steps=1, save_strategy="steps", save_steps=1, **(AUTO | then)).train()
    options = AUTO | now
    if "objective" in now:
        options = {"objective": "gspo", "per_device_train_batch_size": 8}
    with pytest.raises(ValueError, match=match):
        make(tiny_model, tmp_path, **options).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"trust_band": "wide"}, "trust_band='wide'"),
        (AUTO_BAND | {"trust_band_share": 0.0}, "trust_band_share=0.0"),
        (AUTO_BAND | {"trust_band_share": 1.0}, "trust_band_share=1.0"),
        ({"trust_band_share": 0.1}, "trust_band_share=0.1 belongs to trust_band='auto'"),
        ({"objective": "gspo", "trust_band_share": 0.1}, "trust_band_share=0.1 belongs to objective='tbpo'"),
        (AUTO_BAND | {"objective": "grpo"}, "trust_band='auto' belongs to objective='tbpo'"),
        (AUTO_BAND | {"positive_epsilon_high": 0.1}, "positive_epsilon_high=0.1"),
        (AUTO_BAND | {"negative_epsilon_low": 0.1}, "negative_epsilon_low=0.1"),
        (
            AUTO_BAND | {"per_device_train_batch_size": 2, "steps_per_generation": 4, "num_generations": 4},
            "fewer than 16",
        ),
        (AUTO_BAND | {"trust_band_share": 0.05}, "fewer than 80"),
        (AUTO_BAND | {"trust_band_share": 0.95}, "fewer than 80"),
        (AUTO_BAND | {"steps_per_generation": 1, "per_device_train_batch_size": 64}, "one update per generation"),
    ],
    ids=str,
)
def test_what_cannot_be_estimated_is_refused(tmp_path, options, match):
    with pytest.raises(ValueError, match=match):
        config(tmp_path, **options)


def test_bands_with_a_place_to_estimate_from_are_taken(tmp_path):
    assert config(tmp_path, trust_band="auto").generation_batch_size == 64
    # Each update after the first has ratios other than 1.
    once = {"steps_per_generation": 1, "per_device_train_batch_size": 64}
    assert config(tmp_path, trust_band="auto", num_iterations=2, **once).num_iterations == 2
