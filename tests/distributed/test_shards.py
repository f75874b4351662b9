import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testing_utils import make_tiny_mixture, make_tiny_model
from testing_utils.pictures import make_tiny_picture_model, needs_torchvision


CLAIMS = [
    "codes_are_those_of_one_process",
    "one_process_gathers_codes_and_scales",
    "writes_are_seen_without_a_step",
    "training_equals_one_process",
    "a_trainer_trains_what_it_trains_with_whole_masters",
    "a_mixture_trains_what_it_trains_with_whole_masters",
    "an_adapter_trains_what_it_trains_beside_a_whole_base",
    "precisions_in_turn_train_what_they_train_with_whole_masters",
    "engine_numerics_train_what_they_train_with_whole_masters",
    "operations_are_put_into_sharded_modules",
    "colocated_engines_are_filled_by_every_process",
    "a_server_is_filled_and_filled_again",
    "a_reference_is_low_bit_and_sharded_too",
    "a_run_goes_on_from_its_checkpoint",
    "one_process_goes_on_from_a_checkpoint_of_two",
    "two_processes_go_on_from_a_checkpoint_of_one",
    "processes_that_disagree_are_told_so",
    "zero_trains_what_it_trains_with_whole_state",
    "zero_resumes_its_own_checkpoints_alone",
    "zero_fills_colocated_engines",
    "pictures_train_what_they_train_with_whole_masters",
]
NIGHTLY = [
    "zero_trains_pictures",
    "pictures_are_shown_to_an_engine_in_every_process",
    "the_peak_of_fsdp2_is_what_was_calculated",
    "torchao_steps_in_4_bits",
    "engine_numerics_beside_an_adapter_or_a_reference",
    "a_killed_process_leaves_a_checkpoint",
    "zero_trains_an_adapter_a_reference_and_engine_numerics",
    "zero_leaves_a_checkpoint_when_a_process_is_killed",
]
# Claims that go on from the files of others.
AFTER = {
    "one_process_goes_on_from_a_checkpoint_of_two": ["a_run_goes_on_from_its_checkpoint"],
    "two_processes_go_on_from_a_checkpoint_of_one": [
        "a_run_goes_on_from_its_checkpoint",
        "one_process_goes_on_from_a_checkpoint_of_two",
    ],
    "a_killed_process_leaves_a_checkpoint": ["a_run_goes_on_from_its_checkpoint"],
    "zero_resumes_its_own_checkpoints_alone": ["zero_trains_what_it_trains_with_whole_state"],
    "zero_leaves_a_checkpoint_when_a_process_is_killed": ["zero_trains_what_it_trains_with_whole_state"],
}


def _param(claim):
    marks = [pytest.mark.nightly] * (claim in NIGHTLY) + [needs_torchvision] * ("pictures" in claim)
    return pytest.param(claim, marks=marks)


@pytest.fixture(scope="module")
def said(tmp_path_factory, request):
    """What each process of the launches says of the claims that are asked for, in one start of Python."""
    pytest.importorskip("peft")
    asked = {item.callspec.params["claim"] for item in request.session.items if item.path == request.path}
    asked |= {before for claim in asked for before in AFTER.get(claim, [])}
    folder = tmp_path_factory.mktemp("shards")
    for arch in ("qwen2", "gemma"):
        make_tiny_model(folder, arch)
    make_tiny_mixture(folder, num_experts=5)
    if any("pictures" in claim for claim in asked):
        make_tiny_picture_model(folder, "qwen2_5_vl")
    launch = [sys.executable, str(Path(__file__).with_name("shards.py")), str(folder), *asked]
    # With the folder where conftest.py looks for torchvision.
    places = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", ""), os.path.join(sys.prefix, "pictures")]
    path = os.pathsep.join(places)
    environment = {**os.environ, "PYTHONPATH": path, "TORCH_COMPILE_DISABLE": "1"}
    result = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=900)
    # With the seconds of each claim, which `-rP` shows.
    print(result.stdout)
    assert result.returncode == 0, result.stderr[-4000:]
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    said = {claim: [said[claim] for said in found if claim in said] for claim in set().union(*found)}
    assert said.keys() == asked, "a claim is listed here that is not checked"
    return said


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.xdist_group("ddp")
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("claim", [_param(claim) for claim in (*CLAIMS, *NIGHTLY)])
def test_with_sharded_masters(said, claim):
    if claim.startswith("zero_"):
        pytest.importorskip("deepspeed")
    # All processes of its launch, or the one that makes launches of its own.
    assert set(said[claim]) == {"holds"}, said[claim]
