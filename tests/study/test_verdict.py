import json
import re

import pytest

from recorded_runs import CONFIGS, Page, read_page, report, write_run


def test_page_says_what_exceeds_the_noise_and_lists_models(grid_page):
    text = Page(read_page(grid_page)).text
    assert "org/model, org/other, w4a16-observer: 10 runs in 4 groups" in text
    assert "Differences that exceed the seed noise: 2" in text
    assert "Differences that do not exceed the seed noise: 1" in text
    assert "These runs train 2 models: org/model, org/other." in text
    assert "Student's distribution" in text
    assert re.search(r"w4a16-observer\s*INT4\s*128 input features\s*16-bit\s*4\.125\b", text)
    assert re.search(r"bf16\s*16-bit\s*-\s*16-bit\s*16\b", text)
    assert "Irregularities" not in text
    assert re.search(r"All groups share: objective tbpo, use_vllm True, learning_rate 1e-05, max_steps 40\.", text)


def test_one_group_is_judged_by_cards_and_several_by_a_table(tmp_path, grid_page):
    pytest.importorskip("matplotlib")
    report(tmp_path / "report.html", write_run(tmp_path / "run", quantize_learner=False, mismatch=0.2))
    page, grid = Page(read_page(tmp_path / "report.html")), Page(read_page(grid_page))
    assert {"card fine", "card bad"} <= page.classes and "card fine" not in grid.classes
    assert re.search(r"Alignednot healthymismatch 0\.3\d", page.text) and "Set quantize_learner=True." in page.text
    assert "No difference" not in page.text and "to compare" not in page.text
    assert re.search(r"Learningfinereward 0\.\d+ → 0\.\d+", page.text)
    assert {"fine", "watch"} <= grid.classes and "Health of each group" in grid.text


def test_differences_of_an_evaluation_are_judged_by_the_same_rule(tmp_path):
    pytest.importorskip("matplotlib")
    paths = []
    for name, solved in (("QaRL", (80, 82, 81)), ("rollout-only", (20, 25, 30)), ("bf16", (79, 83, 80))):
        for seed, correct in enumerate(solved):
            path = write_run(tmp_path / f"{name}-{seed}", **CONFIGS[name], seed=seed)
            (path / "evaluation.json").write_text(json.dumps({"greedy": {"correct": correct, "total": 100}}))
            paths.append(path)
    report(tmp_path / "report.html", *paths)
    text = Page(read_page(tmp_path / "report.html")).text
    assert "Differences of the greedy evaluation" in text and "Differences of the sampled evaluation" not in text
    # s = sqrt((1 + 25) / 2) points, times 2.776 sqrt(2 / 3).
    assert (
        "QaRL, TBPO has a greedy score of 0.81, rollout-only, TBPO of 0.25: the difference of 0.56 exceeds "
        "the seed noise of 0.0817." in text
    )
    assert "has a greedy score of 0.81, bf16, TBPO of 0.807: the difference of 0.00333 does not" in text


def test_one_seed_per_group_leaves_noise_unjudged(tmp_path):
    pytest.importorskip("matplotlib")
    runs = [write_run(tmp_path / name, scheme=name) for name in ("fp8", "bf16")]
    report(tmp_path / "report.html", *runs)
    text = Page(read_page(tmp_path / "report.html")).text
    assert "cannot be judged, with one seed of" in text and "exceed the seed noise:" not in text
    assert "No difference of final reward can be judged" in text
