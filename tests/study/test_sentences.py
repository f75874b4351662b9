import json
import re

import pytest

from recorded_runs import rewards_run, write_run
from trl_qarl.study.runs import Run, read_run
from trl_qarl.study.sentences import describe_differences, find_gaps
from trl_qarl.study.statistics import make_groups


def test_gaps_are_told_as_ranges_of_logged_steps():
    rows = {step: {"a": None if step in (2, 4, 8, 12) else 1.0} for step in range(2, 14, 2)}
    assert find_gaps(Run("run", {}, rows)) == ["a is not finite at 4 steps: 2 to 4, 8, 12."]


def test_gaps_at_the_same_steps_are_told_once():
    rows = {step: {"a": None, "b": None if step == 2 else 0.0, "c": None} for step in (1, 2)}
    assert find_gaps(Run("run", {}, rows)) == [
        "a, c are not finite at 2 steps: 1 to 2.",
        "b is not finite at 1 step: 2.",
    ]


@pytest.mark.parametrize("metrics", [("reward",), ("reward", "entropy")])
def test_missing_values_are_a_gap(tmp_path, metrics):
    path = write_run(tmp_path / "run")
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for row in rows[9:30]:
        for metric in metrics:
            del row[metric]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert find_gaps(read_run(path)) == [f"{', '.join(metrics)}: nothing logged between steps 9 and 31."]


def test_sentences_name_groups_difference_and_noise():
    finals = {"x": [0.80, 0.81], "y": [0.2, 0.21], "z": [0.8]}
    runs = [rewards_run(seed, [value], scheme=s) for s, values in finals.items() for seed, value in enumerate(values)]
    found = describe_differences(make_groups(runs))
    assert found["exceeds"] == [
        "QaRL, TBPO, x ends at 0.805, QaRL, TBPO, y at 0.205: the difference of 0.6 exceeds the seed noise of 0.0304."
    ]
    assert found["within"] == []
    assert found["unknown"][0] == (
        "QaRL, TBPO, z ends at 0.8, QaRL, TBPO, y at 0.205: the seed noise of this difference of 0.595 cannot be judged, "
        "with one seed of QaRL, TBPO, z."
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
