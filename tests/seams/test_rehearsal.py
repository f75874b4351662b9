"""
Signatures of the functions of vLLM that our GPU path calls, in a build for CPUs; `benchmarks/rehearsal/` checks CUDA
builds.
"""

import json
import re
import runpy
import tomllib
from pathlib import Path

import pytest

from trl_qarl.engines.gpu_kernels import RELEASES, Gpu, choose_kernels, unexpected_kernels
from trl_qarl.quantization.schemes import get_scheme


ROOT = Path(__file__).parents[2]
REHEARSAL = ROOT / "benchmarks" / "rehearsal"
contract = runpy.run_path(str(REHEARSAL / "contract.py"))
record = {path.stem: json.loads(path.read_text()) for path in sorted(REHEARSAL.glob("kernels/*.json"))}


@pytest.mark.vllm
@pytest.mark.parametrize("name", contract["PYTHON_CHECKS"])
def test_vllm_is_called_on_gpus_as_its_functions_take_it(name):
    assert [*contract["failures"]({name: contract["PYTHON_CHECKS"][name]})] == []


@pytest.mark.vllm
def test_a_moved_or_changed_function_is_named(monkeypatch):
    envs = pytest.importorskip("vllm.envs")
    checks = {name: contract["PYTHON_CHECKS"][name] for name in ("disable_envs_cache", "variables")}
    monkeypatch.setattr(envs, "disable_envs_cache", lambda now: None)
    monkeypatch.delitem(envs.environment_variables, "VLLM_BATCH_INVARIANT")
    assert [*contract["failures"](checks)] == [
        "disable_envs_cache: TypeError: missing a required argument: 'now'",
        "variables: AssertionError: not there: ['VLLM_BATCH_INVARIANT']",
    ]


def test_the_extra_covers_the_rehearsed_releases():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [requirement] = project["optional-dependencies"]["vllm"]
    minors = [int(release.removeprefix("0.")) for release in RELEASES]
    assert requirement == f"vllm>={RELEASES[0]},<0.{minors[-1] + 1}" and minors == [*range(minors[0], minors[-1] + 1)]
    workflow = (ROOT / ".github/workflows/rehearsal.yml").read_text()
    assert re.search(r"release: \[(.*)\]", workflow)[1] == ", ".join(f'"{release}"' for release in RELEASES)
    installation = (ROOT / "docs/installation.md").read_text()
    assert f"| GPU | `vllm` {RELEASES[0]} to {RELEASES[-1]}" in installation
    assert [*record] == [*RELEASES]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.0", "10.0", "12.0"])
def test_engines_get_the_recorded_kernels(release, capability):
    major, minor = capability.split(".")
    gpu = Gpu((int(major), int(minor)), vllm=f"{release}.0")
    for name, found in record[release][capability].items():
        scheme = get_scheme(name.removeprefix("mixture "))
        choice, kernels = choose_kernels(scheme, gpu), found["asked"].split()
        assert (kernels == ["refused"]) == bool(choice.refusal), name
        if scheme.is_quantized and not choice.refusal:
            assert not [*unexpected_kernels(kernels, [scheme], [scheme], gpu)], name
