"""Trainers and servers under fire; `scenarios.py` says what happens, `campaign.py` what must come of it."""

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pytest

from faults.scenarios import CHOSEN, FAMILIES


ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks" / "faults" / "campaign.py"
UNDISTURBED = {"name": "undisturbed", "expect": "completes"}
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="TRL's client of a server needs vLLM")


def find(names) -> list[dict]:
    scenarios = {scenario["name"]: scenario for family in FAMILIES.values() for scenario in family}
    return [scenarios[name] for name in names]


@needs_vllm
@pytest.mark.slow
# Dozens of trainings, three at a time: on a machine that others use, too, that takes a while.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "scenarios",
    [
        pytest.param(find(CHOSEN), id="one of each"),
        *(pytest.param(scenarios, id=family, marks=pytest.mark.nightly) for family, scenarios in FAMILIES.items()),
    ],
)
def test_no_fault_changes_what_is_learned(tmp_path, warm, scenarios):
    (tmp_path / "asked.json").write_text(json.dumps(asked := [UNDISTURBED, *scenarios]))
    # The servers are programs of their own.
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    code = warm.start([sys.executable, PROGRAM, tmp_path, "3"], env, log := tmp_path / "log").wait(1700)
    assert code == 0, log.read_text()[-5000:]
    reports = [json.loads(line) for line in (tmp_path / "reports").read_text().splitlines()]
    for report in reports:
        print({key: value for key, value in report.items() if key not in ("log", "calls", "digest")})
    assert {report["name"] for report in reports} == {scenario["name"] for scenario in asked}
    if scenarios is FAMILIES["signals to the trainer"]:
        # Some come after the end.
        assert {"SIGKILL", "Signaled", "KeyboardInterrupt"} <= {report["ended"][0] for report in reports}
    # Weights that depend on nothing that is drawn are the same whatever a fault does to it.
    assert max(report.get("dropped", 0) for report in reports) < 0.1
    failed = [report for report in reports if report["problems"]]
    for report in failed[:3]:
        print(report["name"], report.pop("log", ""), sep="\n")
    lines = [f"{report['name']}: {report.get('ended')}; {'; '.join(report['problems'])}" for report in failed]
    assert not failed, f"{len(failed)} of {len(reports)} scenarios:\n" + "\n".join(lines)


def test_the_page_of_the_campaign_lists_all_families():
    page = (ROOT / "benchmarks" / "faults" / "README.md").read_text()
    assert re.findall(r"^\| ([a-z0-9, ]+) \|", page, re.MULTILINE)[1:] == list(FAMILIES)
    assert f"[{len(FAMILIES)} families of" in (ROOT / "docs" / "reliability.md").read_text()
    names = [scenario["name"] for scenarios in FAMILIES.values() for scenario in scenarios]
    assert len(set(names)) == len(names) >= 100


def test_each_family_has_a_scenario_that_runs_every_time():
    chosen = find(CHOSEN)
    # One run meets each kind of fault of a request.
    run = {f"requests, {fault['kind']}" for each in chosen for fault in each.get("faults", [])}
    run |= {family for family, scenarios in FAMILIES.items() if any(each in chosen for each in scenarios)}
    assert FAMILIES.keys() - run == set()
