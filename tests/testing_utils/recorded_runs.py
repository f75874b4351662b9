"""Directories as runs write them, for the tests of what reads them."""

import bisect
import itertools
import json
import math
import random
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from trl_qarl.cli import main
from trl_qarl.telemetry.run_files import HISTOGRAM_EDGES


CONFIG = {
    "objective": "tbpo",
    "quantize_learner": True,
    "scheme": "w4a16",
    "group_size": 128,
    "seed": 0,
    "model": "org/model",
    "use_vllm": True,
    "learning_rate": 1e-5,
    "max_steps": 40,
    "versions": {"torch": "2.13.0", "trl": "1.16.0"},
}
CONFIGS = {"QaRL": {}, "rollout-only": {"quantize_learner": False}, "bf16": {"scheme": "bf16", "group_size": None}}


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
        for name, width in (
            ("ratio", 4e-4),
            ("mismatch_weight", mismatch),
            ("token_ratio", 0.1),
            ("token_mismatch_weight", 10 * mismatch),
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
                }


def write_grid(path):
    """Three groups with three seeds, one of another model with one seed."""
    for (name, final, mismatch), seed in itertools.product(
        (("QaRL", 0.8, 0.002), ("rollout-only", 0.5, 0.05), ("bf16", 0.79, 0.03)), (0, 1, 2)
    ):
        write_run(path / f"{name}-seed{seed}", **CONFIGS[name], final=final, mismatch=mismatch, seed=seed)
    write_run(path / "other", model="org/other", **CONFIGS["bf16"])
    return path


def make_run(name, config, rows=({"step": 1},)):
    """A run as it is read from a file with these rows."""
    pytest.importorskip("pandas")
    from trl_qarl.study.runs import Run, make_metrics

    return Run(name, config, make_metrics(rows), path=name)


def rewards_run(seed, rewards, **config):
    rows = [{"step": step, "reward": reward} for step, reward in enumerate(rewards, 1)]
    return make_run(f"{config}-{seed}", {**CONFIG, "max_steps": len(rewards), "seed": seed, **config}, rows)


def report(path, *run_dirs):
    """Runs `trl-qarl report`; skips the test where what it needs is not installed."""
    for package in ("jinja2", "matplotlib", "pandas", "scipy"):
        pytest.importorskip(package)
    return main(["report", *map(str, run_dirs), "--output", str(path)])


def read_page(path):
    """Text of the page, which must be well-formed XML but for the document type."""
    page = path.read_text()
    ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))
    return page


class Page(HTMLParser):
    """Text, elements, addresses and values of `class` of a page."""

    def __init__(self, page):
        super().__init__()
        self.text, self.tags, self.addresses, self.classes = "", set(), [], set()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action", "srcset", "data")]
        self.classes |= {value for name, value in attrs if name == "class"}

    def handle_data(self, data):
        self.text += data
