import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from shards import AFTER, CLAIMS, NIGHTLY
from testing_utils import make_own_code, make_tiny_mixture, make_tiny_model
from testing_utils.hub_stand_in import StandInHub, environment, local_files, pushed_files
from testing_utils.pictures import make_tiny_picture_model, needs_torchvision


def _param(claim):
    marks = [pytest.mark.nightly] * (claim in NIGHTLY) + [needs_torchvision] * ("pictures" in claim)
    return pytest.param(claim, marks=marks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def hub(folder):
    with StandInHub() as hub:
        yield hub


@pytest.fixture(scope="module")
def said(folder, hub, warm, request):
    """Results of each process for the requested claims, in one command."""
    pytest.importorskip("peft")
    asked = {item.callspec.params["claim"] for item in request.session.items if item.path == request.path}
    asked |= {before for claim in asked for before in AFTER.get(claim, [])}
    if find_spec("torchvision") is None:
        asked = {claim for claim in asked if "pictures" not in claim}
    for arch in ("qwen2", "gemma"):
        make_tiny_model(folder, arch)
    make_tiny_mixture(folder, num_experts=5)
    make_own_code(folder / "own")
    if any("pictures" in claim for claim in asked):
        make_tiny_picture_model(folder, "qwen2_5_vl")
    launch = [sys.executable, Path(__file__).with_name("shards.py"), folder, *asked]
    # What vLLM compiles in a server, for seconds, computes the same as what it does not.
    variables = {"TORCH_COMPILE_DISABLE": "1"} | environment(hub, folder / "home")
    code = warm.start(launch, os.environ | variables, log := folder / "log").wait(1700)
    # With the seconds of each claim, which `-rP` shows.
    print(*re.findall(r"^\w+ \d+ [\d.]+ s holds$", log.read_text(), re.MULTILINE), sep="\n")
    assert code == 0, log.read_text()[-4000:]
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    said = {claim: [said[claim] for said in found if claim in said] for claim in set().union(*found)}
    assert said.keys() == asked, "a claim is listed here that is not checked"
    return said


# Everything happens in the fixture: on a machine that others use, too, that takes a while.
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.xdist_group("ddp"), pytest.mark.timeout(1800)]


@pytest.mark.parametrize("claim", [_param(claim) for claim in (*CLAIMS, *NIGHTLY)])
def test_with_several_processes(said, claim):
    if claim.startswith("zero_"):
        pytest.importorskip("deepspeed")
    # All processes of its launch, or the one that makes launches of its own.
    assert set(said[claim]) == {"holds"}, said[claim]


@pytest.mark.parametrize("claim", ["processes_train_the_same_weights_and_go_on_from_a_checkpoint"])
def test_one_of_the_processes_pushes(said, claim, folder, hub):
    assert [len(repo.messages) for repo in hub.repos.values()] == [1, 1]
    assert sum("/commit/" in request for request in hub.requests) == 2
    for mode in ("adapter", "merged"):
        pushed = pushed_files(hub, f"someone/{mode}")
        assert pushed == local_files(folder / f"ddp-{mode}" / "w4a16") and "model.safetensors" in pushed
        assert ("adapter/adapter_model.safetensors" in pushed) == (mode == "adapter")
