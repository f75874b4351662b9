import base64
import bisect
import itertools
import json
import math
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from trl_qarl.cli import main
from trl_qarl.study.page import describe_differences, find_gaps
from trl_qarl.study.plots import _scale_around_one, _ticks_around_one
from trl_qarl.study.runs import Run, find_holes, read_run, read_runs
from trl_qarl.study.statistics import STUDENT_95, compare_groups, make_groups, merge_histograms, summarize
from trl_qarl.telemetry.run_files import HISTOGRAM_EDGES


CONFIG = {
    "objective": "tbpo",
    "alignment": "aligned",
    "scheme": "w4a16",
    "group_size": 128,
    "seed": 0,
    "model": "org/model",
    "use_vllm": True,
    "learning_rate": 1e-5,
    "max_steps": 40,
    "versions": {"torch": "2.13.0", "trl": "1.16.0"},
}


def write_run(path, *, num_steps=40, final=0.8, mismatch=0.01, rows=None, **config):
    """A directory as a run of 40 steps writes it, with values drawn from the seed. Returns its path."""
    config = {**CONFIG, **config}
    draw = random.Random(f"{config['seed']} {final} {mismatch}")
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps(config))
    if rows is None:
        rows = []
        level = 0.03 * (config["seed"] % 3 - 1)
        for step in range(1, num_steps + 1):
            error = mismatch * draw.uniform(0.8, 1.2) * (1 + step / 40)
            rows.append(
                {
                    "step": step,
                    "time": 1e9 + step,
                    "reward": final * (1 - math.exp(-step / 10)) + level + draw.gauss(0, 0.02),
                    "entropy": 0.5 + 0.5 * math.exp(-step / 20) + draw.gauss(0, 0.02),
                    "loss": draw.gauss(0, 0.01),
                    "mismatch/abs_logp_mean": error,
                    "mismatch/abs_logp_max": 20 * error * draw.uniform(0.7, 1.5),
                    "mismatch/k3": error**2 / 2,
                    "tbpo/dropped/positive_high": draw.uniform(0, 0.1),
                    "tbpo/dropped/negative_low": draw.uniform(0, 0.2),
                    "tbpo/dropped/negative_high": draw.uniform(0, 0.05),
                    "tbpo/dropped/total": draw.uniform(0, 0.15),
                    "step_time": draw.uniform(8, 9),
                    "publish/seconds": draw.uniform(0.4, 0.5),
                    "rollout/tokens_per_second": draw.uniform(900, 1100),
                }
            )
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "distributions.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in make_distributions(draw, mismatch, num_steps))
    )
    return path


def make_distributions(draw, mismatch, num_steps):
    for step in range(1, num_steps + 1):
        for name, width, bounds in (
            ("ratio", 4e-4, {"positive": [None, 1.0004], "negative": [0.9997, 1.0007]}),
            ("mismatch_weight", mismatch, {"positive": [0.5, 2.0], "negative": [0.5, 2.0]}),
            ("token_ratio", 0.1, {"positive": [None, None], "negative": [None, None]}),
            ("token_mismatch_weight", 10 * mismatch, {"positive": [None, None], "negative": [None, None]}),
        ):
            edges = HISTOGRAM_EDGES
            for sign in ("positive", "negative"):
                counts = [0] * (len(edges) - 1)
                for _ in range(32):
                    counts[bisect.bisect(edges, math.exp(draw.gauss(0, width))) - 1] += 1
                yield {
                    "step": step,
                    "name": name,
                    "sign": sign,
                    "edges": edges,
                    "counts": counts,
                    "bounds": bounds[sign],
                }


def write_grid(path):
    """Three groups with three seeds, one of another model with one seed."""
    for (alignment, final, mismatch), seed in itertools.product(
        (("aligned", 0.8, 0.002), ("rollout-only", 0.5, 0.05), ("none", 0.79, 0.03)), (0, 1, 2)
    ):
        write_run(path / f"{alignment}-seed{seed}", alignment=alignment, final=final, mismatch=mismatch, seed=seed)
    write_run(path / "other", model="org/other", scheme="bf16", alignment="none", group_size=None)
    return path


def rewards_run(seed, rewards, **config):
    rows = {step: {"reward": reward} for step, reward in enumerate(rewards, 1)}
    return Run(f"{config}-{seed}", {**CONFIG, "max_steps": len(rewards), "seed": seed, **config}, rows)


def report(path, *run_dirs):
    return main(["report", *map(str, run_dirs), "--output", str(path)])


def read_page(path):
    """Text of the page, which must be well-formed XML but for the document type."""
    page = path.read_text()
    ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))
    return page


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    return write_grid(tmp_path_factory.mktemp("grid"))


@pytest.fixture(scope="module")
def grid_page(grid, tmp_path_factory):
    pytest.importorskip("matplotlib")
    path = tmp_path_factory.mktemp("page") / "report.html"
    assert report(path, grid) == 0
    return path


# Reading


def test_run_is_read_with_its_metrics_distributions_and_evaluation(tmp_path):
    path = write_run(tmp_path / "run")
    (path / "evaluation.json").write_text('{"greedy": {"correct": 3, "total": 4}}')
    run = read_run(path)
    assert (run.name, run.last_step, len(run.distributions), run.notes) == ("run", 40, 320, [])
    assert run.evaluation == {"greedy": {"correct": 3, "total": 4}}
    assert len(run.values("reward")) == 40 and "time" not in run.rows[1]


def test_rows_of_one_step_are_merged(tmp_path):
    rows = [{"step": 1, "reward": 0.5}, {"step": 1, "eval_reward": 0.25}]
    assert read_run(write_run(tmp_path / "run", rows=rows)).rows == {1: {"reward": 0.5, "eval_reward": 0.25}}


def test_half_written_last_line_is_left_out_and_noted(tmp_path):
    path = write_run(tmp_path / "run", rows=[{"step": 40, "reward": 0.5}])
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 41, "rew')
    run = read_run(path)
    assert list(run.rows) == [40]
    assert run.notes == ["The last line of metrics.jsonl is incomplete; the rows before it are used."]


def test_line_broken_by_a_kill_before_a_resume_is_left_out_and_noted(tmp_path):
    path = write_run(tmp_path / "run", rows=[])
    (path / "metrics.jsonl").write_text(
        '{"step": 39, "reward": 1}\n{"step": 4{"step": 40, "reward": 2}\n\n{"step": 40}\n'
    )
    assert read_run(path).notes == ["metrics.jsonl: 1 unreadable lines are not used (line 2)."]


@pytest.mark.parametrize(
    "line", ["3", "[]", "null", '{"reward": 1}', '{"step": "1"}', '{"step": -1}', '{"step": true}']
)
def test_line_that_is_no_row_is_left_out(tmp_path, line):
    path = write_run(tmp_path / "run", rows=[])
    (path / "metrics.jsonl").write_text(f'{line}\n{{"step": 40, "reward": 1}}\n')
    assert read_run(path).rows == {40: {"reward": 1.0}}


def test_steps_that_a_resumed_run_trained_again_replace_the_earlier_ones(tmp_path):
    rows = [{"step": step, "reward": 0} for step in range(1, 40)] + [{"step": step, "reward": 1} for step in (31, 40)]
    run = read_run(write_run(tmp_path / "run", rows=rows))
    assert list(run.rows) == [*range(1, 32), 40]
    assert run.values("reward")[30] == 0 and run.values("reward")[31] == 1
    assert run.notes == ["The run was resumed: 9 logged steps were trained again, the later values are used."]


def test_values_that_are_not_finite_become_gaps(tmp_path):
    path = write_run(tmp_path / "run", rows=[])
    values = ["null", "NaN", "Infinity", "1e999", "1" + "0" * 400, "0.5", '"text"', "true"]
    lines = [f'{{"step": {step}, "reward": {value}}}\n' for step, value in enumerate(values, 33)]
    (path / "metrics.jsonl").write_text("".join(lines))
    run = read_run(path)
    assert run.gaps("reward") == [33, 34, 35, 36, 37] and run.values("reward") == {38: 0.5}
    assert find_gaps(run) == ["reward is not finite at 5 steps: 33 to 37."]


def test_gaps_are_told_as_ranges_of_logged_steps():
    rows = {step: {"a": None if step in (2, 4, 8, 12) else 1.0} for step in range(2, 14, 2)}
    assert find_gaps(Run("run", {}, rows)) == ["a is not finite at 4 steps: 2 to 4, 8, 12."]


def test_gaps_at_the_same_steps_are_told_once():
    rows = {step: {"a": None, "b": None if step == 2 else 0.0, "c": None} for step in (1, 2)}
    assert find_gaps(Run("run", {}, rows)) == [
        "a, c are not finite at 2 steps: 1 to 2.",
        "b is not finite at 1 step: 2.",
    ]


def test_steps_further_apart_than_usual_are_a_hole():
    assert find_holes([1, 3, 5, 7, 31, 33]) == [(7, 31)]
    assert find_holes([1, 10, 20, 30, 35]) == find_holes([1, 40]) == find_holes([]) == []


@pytest.mark.parametrize("metrics", [("reward",), ("reward", "entropy")])
def test_missing_values_are_a_gap(tmp_path, metrics):
    path = write_run(tmp_path / "run")
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for row in rows[9:30]:
        for metric in metrics:
            del row[metric]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert find_gaps(read_run(path)) == [f"{', '.join(metrics)}: nothing logged between steps 9 and 31."]


def test_resumed_run_that_repeats_one_step_forgets_what_the_killed_one_logged_there(tmp_path):
    rows = [{"step": 1, "loss": 0.0, "reward": 0.1}, {"step": 1, "loss": 0.0, "entropy": 0.5}]
    run = read_run(write_run(tmp_path / "run", rows=rows, max_steps=1))
    assert run.rows == {1: {"loss": 0.0, "entropy": 0.5}}
    assert run.notes == ["The run was resumed: 1 logged steps were trained again, the later values are used."]


def test_summary_and_evaluation_of_a_step_join_its_row(tmp_path):
    rows = [{"step": 1, "loss": 0.0, "reward": 0.1}, {"step": 1, "eval_reward": 0.2}, {"step": 1, "train_loss": 0.0}]
    run = read_run(write_run(tmp_path / "run", rows=rows, max_steps=1))
    assert run.rows == {1: {"loss": 0.0, "reward": 0.1, "eval_reward": 0.2, "train_loss": 0.0}} and not run.notes


@pytest.mark.parametrize(
    "config", ['{"group_size": [128]}', '{"group_size": "128"}', '{"group_size": 0}', '{"a":' * 20_000]
)
def test_configuration_of_another_form_is_one_line(tmp_path, capsys, config):
    path = write_run(tmp_path / "run")
    (path / "run.json").write_text(config)
    with pytest.raises(SystemExit, match="2"):
        report(tmp_path / "report.html", path)
    (line,) = capsys.readouterr().err.splitlines()
    assert "run.json" in line


def test_numbers_too_large_to_compute_with_are_not_finite(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / f"run{seed}", rows=[{"step": 1, "reward": 1e200 * (1 + seed)}], seed=seed, max_steps=1)
    (tmp_path / "run0" / "evaluation.json").write_text('{"a":' * 20_000)
    with open(tmp_path / "run0" / "metrics.jsonl", "a") as file:
        file.write('{"step": 1' + "0" * 400 + "}\n")
    runs, _ = read_runs([tmp_path])
    assert runs[0].last_step == 1 and runs[0].gaps("reward") == [1] and not runs[0].evaluation
    assert describe_differences(make_groups(runs)) == {"exceeds": [], "within": [], "unknown": []}


def test_runs_of_equal_names_keep_their_own_results(tmp_path):
    rows = [{"step": step, "reward": 0.5} for step in (1, 2)]
    paths = [write_run(tmp_path / a / "out" / "s", rows=rows, seed=seed) for seed, a in enumerate("ab")]
    runs, _ = read_runs(paths)
    assert [run.name for run in runs] == ["a/out/s", "b/out/s"]


def test_groups_of_different_rewards_are_not_compared():
    runs = [rewards_run(seed, [0.1 * seed], reward_funcs=[name]) for name in "ab" for seed in (0, 1)]
    assert describe_differences(make_groups(runs)) == {"exceeds": [], "within": [], "unknown": []}


def test_axis_of_a_distribution_shows_what_lies_around_one_and_what_lies_far_out():
    counts = [0] * (len(HISTOGRAM_EDGES) - 1)
    draw = random.Random(0)
    for index in range(3000):
        ratio = math.exp(draw.gauss(0, 5e-4 if index % 100 else 0.3))
        counts[bisect.bisect(HISTOGRAM_EDGES, ratio) - 1] += 1
    forward, inverse = _scale_around_one([{"edges": HISTOGRAM_EDGES, "counts": counts}])
    low, high = forward(0.5), forward(2.0)
    places = [float((forward(x) - low) / (high - low)) for x in (0.5, 0.9997, 1, 1.0007, 2)]
    assert places[0] == 0 and places[4] == 1 and places[2] == pytest.approx(0.5)
    assert 0.25 < places[1] < 0.45 and 0.55 < places[3] < 0.75
    assert [float(inverse(forward(x))) for x in (0.5, 0.9997, 1.0007, 2)] == pytest.approx([0.5, 0.9997, 1.0007, 2])
    ticks = _ticks_around_one(0.5, 2.0, forward)
    assert {0.5, 1.0, 2.0} <= set(ticks) and any(abs(tick - 1) <= 1e-3 for tick in ticks if tick != 1)


def test_run_that_ended_early_is_noted(tmp_path):
    assert read_run(write_run(tmp_path / "run", num_steps=12)).notes == ["The run ended at step 12 of 40."]


@pytest.mark.parametrize(
    "change",
    [
        {"edges": [1, 2]},
        {"edges": [1, 1, 2]},
        {"edges": [1, None, 2]},
        {"counts": [1, -1]},
        {"counts": 3},
        {"bounds": [1]},
        {"bounds": None},
        {"name": "x"},
        {"sign": 0},
    ],
    ids=str,
)
def test_malformed_distribution_is_left_out_and_noted(tmp_path, change):
    row = {"step": 1, "name": "ratio", "sign": "positive", "edges": [1, 2, 3], "counts": [4, 5], "bounds": [None, 2]}
    path = write_run(tmp_path / "run")
    (path / "distributions.jsonl").write_text(f"{json.dumps(row | change)}\n{json.dumps(row)}\n")
    run = read_run(path)
    assert run.distributions == [row]
    assert run.notes == ["distributions.jsonl: 1 unreadable lines are not used (line 1)."]


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"greedy": {"correct": 5, "total": 4}}', '{"greedy": {"correct": 0, "total": 0}}']
)
def test_malformed_evaluation_is_left_out_and_noted(tmp_path, text):
    path = write_run(tmp_path / "run")
    (path / "evaluation.json").write_text(text)
    run = read_run(path)
    assert run.evaluation == {} and "evaluation.json has another form" in run.notes[0]


def test_directory_of_compare_is_read_and_its_unusable_cells_are_noted(tmp_path):
    write_run(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "cell.json").write_text("{}")
    (tmp_path / "unrelated").mkdir()
    runs, notes = read_runs([tmp_path])
    assert [run.name for run in runs] == ["a"]
    assert notes == [f"Left out: {tmp_path / 'b'} has no metrics.jsonl: no step of it was logged."]


def test_runs_of_equal_name_are_told_apart(tmp_path):
    runs, _ = read_runs([write_run(tmp_path / "x" / "run"), write_run(tmp_path / "y" / "run", seed=1)])
    assert [run.name for run in runs] == ["x/run", "y/run"]


# Grouping and statistics


def test_runs_that_share_everything_but_the_seed_form_a_group():
    configs = (
        {"seed": 0},
        {"seed": 1},
        {"seed": 0, "scheme": "fp8"},
        {"seed": 0, "versions": {"torch": "2.14.0", "trl": "1.16.0"}},
    )
    groups = make_groups([Run(str(index), {**CONFIG, **config}, {1: {}}) for index, config in enumerate(configs)])
    assert [(group.label, [run.name for run in group.runs]) for group in groups] == [
        ("aligned tbpo w4a16 versions.torch=2.13.0", ["0", "1"]),
        ("aligned tbpo fp8", ["2"]),
        ("aligned tbpo w4a16 versions.torch=2.14.0", ["3"]),
    ]


def test_different_models_are_named_and_not_compared():
    groups = make_groups([rewards_run(seed, [seed], model=model) for model in ("a", "b") for seed in (0, 1)])
    assert [group.label for group in groups] == ["aligned tbpo w4a16 a", "aligned tbpo w4a16 b"]
    assert not any(describe_differences(groups).values())


def test_runs_of_one_seed_count_once():
    groups = make_groups([rewards_run(0, [0.0]), rewards_run(0, [1.0]), rewards_run(1, [2.0])])
    (summary,) = summarize(groups)
    assert summary["by_seed"] == {0: 0.5, 1: 2.0} and "count as one seed" in groups[0].runs[0].notes[0]


def test_final_reward_is_the_mean_of_the_last_quarter():
    (summary,) = summarize(
        make_groups([rewards_run(0, [9, 9, 9, 9, 9, 9, 1, 3]), rewards_run(1, [0] * 6 + [5, None])])
    )
    assert summary["by_seed"] == {0: 2.0, 1: 5.0}
    assert (summary["mean"], summary["min"], summary["max"]) == (3.5, 2.0, 5.0)
    assert summary["sd"] == pytest.approx(math.sqrt(2 * 1.5**2))


def test_run_that_ended_before_the_last_quarter_has_no_final_reward():
    runs = [rewards_run(0, [1.0] * 8), rewards_run(1, [1.0] * 8)]
    del runs[1].rows[7], runs[1].rows[8]
    (summary,) = summarize(make_groups(runs))
    assert list(summary["by_run"].values()) == [1.0, None] and summary["sd"] is None


def test_runs_that_all_end_early_are_compared_up_to_there():
    runs = [rewards_run(seed, [1.0] * 6 + [2.0] * 2) for seed in (0, 1)]
    for run in runs:
        run.config["max_steps"] = 100
    (summary,) = summarize(make_groups(runs))
    assert summary["mean"] == 2.0


def naive_student_quantile(freedom):
    """Two-sided 95 % quantile: the density integrated by Simpson's rule, the bound found by bisection."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)

    def mass(bound, parts=4000):
        heights = [(1 + (bound * i / parts) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(parts + 1)]
        return (
            2
            * scale
            * bound
            / parts
            / 3
            * (heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2]))
        )

    low, high = 0.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if mass(middle) < 0.95 else (low, middle)
    return low


def test_quantiles_are_students():
    assert [naive_student_quantile(freedom) for freedom in range(1, 21)] == pytest.approx(STUDENT_95, abs=6e-4)


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        ([0.80, 0.81, 0.82], [0.70, 0.71, 0.72], "exceeds"),
        ([0.80, 0.81, 0.82], [0.79, 0.80, 0.81], "within"),
        ([0.80, 0.90], [0.70, 0.75], "within"),
        ([0.80, 0.80], [0.80, 0.80], "within"),
        ([0.80, 0.80], [0.70, 0.70], "exceeds"),
        ([0.80], [0.10, 0.11], "unknown"),
        ([], [0.1, 0.2], "unknown"),
    ],
)
def test_verdict_is_students_test(a, b, verdict):
    runs = [
        rewards_run(seed, [value], scheme=s) for s, values in (("x", a), ("y", b)) for seed, value in enumerate(values)
    ]
    runs += [rewards_run(0, [None], scheme="x")] * (not a)
    of_a, of_b = summarize(make_groups(runs))
    result = compare_groups(of_a, of_b)
    assert result["verdict"] == verdict
    if verdict != "unknown":
        n, m = len(a), len(b)
        mean_a, mean_b = sum(a) / n, sum(b) / m
        squares = sum((x - mean_a) ** 2 for x in a) + sum((x - mean_b) ** 2 for x in b)
        noise = naive_student_quantile(n + m - 2) * math.sqrt(squares / (n + m - 2) * (1 / n + 1 / m))
        assert result["noise"] == pytest.approx(noise, rel=1e-3, abs=1e-12)


def test_sentences_name_groups_difference_and_noise():
    finals = {"x": [0.80, 0.81], "y": [0.2, 0.21], "z": [0.8]}
    runs = [rewards_run(seed, [value], scheme=s) for s, values in finals.items() for seed, value in enumerate(values)]
    found = describe_differences(make_groups(runs))
    assert found["exceeds"] == [
        "aligned tbpo x ends at 0.805, aligned tbpo y at 0.205: the difference of 0.6 exceeds the seed noise of 0.0304."
    ]
    assert found["within"] == []
    assert found["unknown"][0] == (
        "aligned tbpo z ends at 0.8, aligned tbpo y at 0.205: the seed noise of this difference of 0.595 cannot be judged, "
        "with one seed of aligned tbpo z."
    )


def test_pairs_that_differ_in_one_setting_come_first():
    finals = {("x", "a"): 0.0, ("x", "b"): 0.1, ("y", "b"): 0.9}
    runs = [
        rewards_run(seed, [final + seed / 1000], scheme=scheme, objective=objective)
        for (scheme, objective), final in finals.items()
        for seed in (0, 1)
    ]
    sentences = describe_differences(make_groups(runs))["exceeds"]
    assert [re.findall(r"difference of ([\d.]+)", sentence)[0] for sentence in sentences] == ["0.8", "0.1", "0.9"]


def test_histograms_with_equal_edges_add_up():
    rows = [{"edges": [0, 1, 2], "counts": [1, 2]}, {"edges": [0, 1, 2], "counts": [3, 4]}]
    assert merge_histograms(rows) == ([0, 1, 2], [4.0, 6.0])


def test_histograms_with_other_edges_are_redistributed():
    rows = [
        {"edges": [0, 1, 2], "counts": [4, 0]},
        {"edges": [0.5, 2.5], "counts": [8]},
        {"edges": [7, 8], "counts": [0]},
    ]
    edges, counts = merge_histograms(rows, max_bins=5)
    assert edges == pytest.approx([0, 0.5, 1, 1.5, 2, 2.5])
    assert counts == pytest.approx([2, 4, 2, 2, 2])


# The page


class Page(HTMLParser):
    """Text, images, elements and addresses of a page."""

    def __init__(self, page):
        super().__init__()
        self.text, self.images, self.tags, self.addresses = "", [], set(), []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action", "srcset", "data")]
        self.images += [dict(attrs)] if tag == "img" else []

    def handle_data(self, data):
        self.text += data


def test_page_is_self_contained_and_its_figures_lie_beside_it(grid_page):
    text = read_page(grid_page)
    page = Page(text)
    distributions = ("token_ratio", "token_mismatch_weight", "ratio", "mismatch_weight")
    names = ("reward", "entropy", "mismatch", "dropped", *distributions, "time")
    assert {path.name for path in grid_page.parent.glob("*.png")} == {f"report-{name}.png" for name in names}
    assert len(page.images) == len(names) and all(image["alt"] for image in page.images)
    for image, name in zip(page.images, names, strict=True):
        data = base64.b64decode(image["src"].removeprefix("data:image/png;base64,"))
        assert data == (grid_page.parent / f"report-{name}.png").read_bytes() and data.startswith(b"\x89PNG")
    assert all(address.startswith("data:") for address in page.addresses)
    assert not page.tags & {"script", "link", "iframe", "object", "embed"}
    assert "http://" not in text and "https://" not in text and "url(" not in text


def test_page_says_what_exceeds_the_noise_and_lists_models(grid_page):
    text = Page(read_page(grid_page)).text
    assert "10 runs in 4 groups" in text
    assert "Differences that exceed the seed noise: 2" in text
    assert "Differences that do not exceed the seed noise: 1" in text
    assert "These runs train 2 models: org/model, org/other." in text
    assert "Student's distribution" in text
    assert re.search(r"w4a16\s*INT4\s*128 input features\s*16-bit\s*4\.125\b", text)
    assert re.search(r"bf16\s*16-bit\s*-\s*16-bit\s*16\b", text)
    assert "None: every line could be read, and every value is finite." in text


def test_differences_of_an_evaluation_are_judged_by_the_same_rule(tmp_path):
    pytest.importorskip("matplotlib")
    paths = []
    for alignment, solved in (("aligned", (80, 82, 81)), ("rollout-only", (20, 25, 30)), ("none", (79, 83, 80))):
        for seed, correct in enumerate(solved):
            path = write_run(tmp_path / f"{alignment}-{seed}", alignment=alignment, seed=seed)
            (path / "evaluation.json").write_text(json.dumps({"greedy": {"correct": correct, "total": 100}}))
            paths.append(path)
    report(tmp_path / "report.html", *paths)
    text = Page(read_page(tmp_path / "report.html")).text
    assert "Differences of the greedy evaluation" in text and "Differences of the sampled evaluation" not in text
    # s = sqrt((1 + 25) / 2) points, times 2.776 sqrt(2 / 3).
    assert (
        "aligned tbpo w4a16 has a greedy score of 0.81, rollout-only tbpo w4a16 of 0.25: the difference of 0.56 exceeds the seed "
        "noise of 0.0817." in text
    )
    assert "has a greedy score of 0.81, alignment=none tbpo w4a16 of 0.807: the difference of 0.00333 does not" in text


def test_worst_completions_of_each_group_are_on_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    path = write_run(tmp_path / "run")
    rows = [
        {
            "step": step,
            "kind": kind,
            "nats": nats,
            "advantage": 1.0,
            "prompt": "2 +\n<b>",
            "completion": f"⟦{nats}⟧\x00",
        }
        for step, nats in enumerate((1.25, 3.5, 2.75), 1)
        for kind in ("mismatch", "improbable")
    ]
    lines = [json.dumps(row) for row in rows] + ['{"step": 4, "kind": "mismatch", "nats": "NaN"}', '{"step"']
    (path / "worst_completions.jsonl").write_text("\n".join(lines))
    report(tmp_path / "report.html", path)
    text = read_page(tmp_path / "report.html")
    assert text.count("⟦3.5⟧") == text.count("⟦2.75⟧") == 2 and "⟦1.25⟧" not in text
    assert "2 +⏎&lt;b&gt;" in text and "\x00" not in text
    assert "worst_completions.jsonl: 1 unreadable lines" in text and "The last line of worst_completions.jsonl" in text


def test_one_seed_per_group_leaves_noise_unjudged(tmp_path):
    pytest.importorskip("matplotlib")
    runs = [write_run(tmp_path / name, scheme=name) for name in ("fp8", "bf16")]
    report(tmp_path / "report.html", *runs)
    text = Page(read_page(tmp_path / "report.html")).text
    assert "cannot be judged, with one seed of" in text and "exceed the seed noise:" not in text


def test_gaps_zeros_broken_lines_and_missing_metrics_are_on_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        {"step": step, "reward": None if step in (3, 4) else 0.1 * step, "mismatch/k3": 0.0} for step in range(1, 41)
    ]
    path = write_run(tmp_path / "run", rows=rows)
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step"')
    (path / "distributions.jsonl").unlink()
    (tmp_path / "out-entropy.png").write_bytes(b"of an earlier report")
    report(tmp_path / "out.html", path)
    text = Page(read_page(tmp_path / "out.html")).text
    for line in (
        "run: reward is not finite at 2 steps: 3 to 4.",
        "run: The last line of metrics.jsonl is incomplete",
        "No run has a value of entropy.",
        "No run has a distribution of ratio.",
        "There are no two groups of the same model and reward to compare.",
        "mismatch/k3 is 0 or below at 40 steps: 1 to 40.",
    ):
        assert line in text, line
    assert not (tmp_path / "out-entropy.png").exists()


def test_many_pairs_are_folded_and_all_on_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    for index, (scheme, seed) in enumerate(itertools.product("abcdef", (0, 1))):
        rows = [{"step": 40, "reward": index // 2 + seed / 1000}]
        write_run(tmp_path / f"{scheme}{seed}", scheme=scheme, seed=seed, rows=rows)
    report(tmp_path / "report.html", tmp_path)
    page = Page(read_page(tmp_path / "report.html"))
    assert "Differences that exceed the seed noise: 15" in page.text and "5 more" in page.text
    assert page.text.count(" exceeds the seed noise of ") == 15 and "details" in page.tags


def test_evaluation_is_in_the_tables(tmp_path):
    pytest.importorskip("matplotlib")
    for seed, correct in ((0, 80), (1, 90)):
        path = write_run(tmp_path / f"run{seed}", seed=seed)
        scores = {"greedy": {"correct": correct, "total": 100}, "before": {"correct": 13, "total": 100}}
        (path / "evaluation.json").write_text(json.dumps(scores))
    report(tmp_path / "report.html", tmp_path)
    text = Page(read_page(tmp_path / "report.html")).text
    assert "85.0% (80.0% to 90.0%, 2 runs)" in text and "90 of 100 (90.0%)" in text and "13 of 100 (13.0%)" in text


def test_what_runs_wrote_is_escaped(tmp_path):
    pytest.importorskip("matplotlib")
    evil = "<script>alert('$x_$')</script>&\"\x07\ud800"
    path = write_run(tmp_path / "a<b>&amp;", scheme=evil, model="$\\frac", versions={evil: evil})
    (path / "evaluation.json").write_text(json.dumps({evil: {"correct": 1, "total": 2}}))
    rows = [{"step": 40, "reward": 1, evil: None}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report(tmp_path / "report.html", path)
    page = Page(read_page(tmp_path / "report.html"))
    assert "script" not in page.tags and "b" not in page.tags
    assert "<script>alert('$x_$')</script>&\"\N{REPLACEMENT CHARACTER}" in page.text and "a<b>&amp;" in page.text


def test_page_over_an_earlier_one_is_the_same(grid, grid_page):
    before = grid_page.read_bytes()
    report(grid_page, grid)
    assert grid_page.read_bytes() == before


def break_run(path, name):
    if name == "missing":
        shutil.rmtree(path)
    elif name == "a file":
        shutil.rmtree(path)
        path.write_text("")
    elif name == "empty":
        shutil.rmtree(path)
        path.mkdir()
    elif name == "no rows":
        (path / "metrics.jsonl").write_text("")
    elif name == "only a half row":
        (path / "metrics.jsonl").write_text('{"step"')
    elif name == "no configuration":
        (path / "run.json").unlink()
    elif name == "half a configuration":
        (path / "run.json").write_text('{"seed": 0, ')
    elif name == "a list as configuration":
        (path / "run.json").write_text("[]")
    elif name == "a seed that is a list":
        (path / "run.json").write_text('{"seed": [1]}')
    elif name == "only cells without rows":
        (path / "metrics.jsonl").rename(path / "cell.json")
        path.rename(path.parent / "cell")
        path.mkdir()
        (path.parent / "cell").rename(path / "cell")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "does not exist; give directories"),
        ("a file", "is not a directory; give directories"),
        ("empty", "has no metrics.jsonl, nor has a directory in it"),
        ("no rows", "has no complete row"),
        ("only a half row", "has no complete row"),
        ("no configuration", "has no run.json"),
        ("half a configuration", "run.json is not JSON"),
        ("a list as configuration", "must hold a mapping"),
        ("a seed that is a list", "`seed` must be one value, not '[1]'"),
        ("only cells without rows", "has no metrics.jsonl: no step of it was logged"),
    ],
)
def test_unusable_run_is_one_line_and_exit_code_two(tmp_path, capsys, name, message):
    pytest.importorskip("matplotlib")
    path = write_run(tmp_path / "run")
    break_run(path, name)
    with pytest.raises(SystemExit, match="2"):
        report(tmp_path / "report.html", path)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trl-qarl: error: ") and message in line and "run" in line
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("output", "message"), [("folder", "must name a file that ends in .html"), ("a.pdf", "'a.pdf'")]
)
def test_output_that_cannot_be_a_page_is_one_line(tmp_path, capsys, monkeypatch, output, message):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(SystemExit, match="2"):
        report(output, write_run(tmp_path / "run"))
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_run_that_is_given_twice_is_one_line(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = write_run(tmp_path / "run")
    with pytest.raises(SystemExit, match="2"):
        report(tmp_path / "report.html", path, path)
    assert "run is given twice" in capsys.readouterr().err


def test_missing_matplotlib_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        report(tmp_path / "report.html", write_run(tmp_path / "run"))
    (line,) = capsys.readouterr().err.splitlines()
    assert 'Run `pip install "trl-qarl[report]"`.' in line


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_browser_shows_text_and_figures_without_script_or_network(grid_page, tmp_path):
    from matplotlib.image import imread

    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1100,2600"]

    def browse(*options):
        result = subprocess.run(
            [*command, *options, grid_page.as_uri()], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert result.returncode == 0 and "Refused to" not in result.stderr, result.stderr
        return result.stdout

    page = Page(browse("--dump-dom"))
    assert len(page.images) == 9 and "Differences that exceed the seed noise: 2" in page.text
    browse(f"--screenshot={tmp_path / 'page.png'}")
    picture = imread(tmp_path / "page.png")[..., :3]
    # The first group's line in the first figure, which its band leaves in the pure colour of the palette.
    blue = [0x00 / 255, 0x72 / 255, 0xB2 / 255]
    assert (abs(picture - blue).max(axis=-1) < 0.02).sum() > 200
