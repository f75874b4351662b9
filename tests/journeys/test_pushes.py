"""Launches that push to a stand-in for the Hub: what arrives is the deployable policy, with a card that runs."""

import re
import sys

import pytest
from journeys import MARKS
from test_launches import LORA

from testing_utils.hub_stand_in import environment, fails_at, local_files, pushed_files


pytestmark = MARKS
PUSHES = {"push_to_hub": True, "hub_model_id": "someone/policy", "hub_always_push": True}


def prepare(user, hub, name, **options):
    user.environment |= environment(hub, user.folder / "hub")
    if name.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
        options["optim"] = "adamw_torch_fused"
    user.write_recipe(**PUSHES, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fsdp2", {}),
        pytest.param("deepspeed_zero3", {}, marks=pytest.mark.nightly),
        pytest.param("ddp", {}, marks=pytest.mark.nightly),
        pytest.param("fsdp2", LORA, marks=pytest.mark.nightly),
    ],
    ids=["fsdp2", "zero3", "ddp", "fsdp2-lora"],
)
def test_each_save_of_a_launch_pushes_a_policy_that_runs(user, hub, name, options):
    prepare(user, hub, name, hub_strategy="every_save", **options)
    output = user.launch(name)
    steps = [f"Training in progress, step {step}" for step in (1, 2, 3)]
    assert hub.repos["someone/policy"].messages == [*steps, "End of training"]
    files = pushed_files(hub)
    assert "Pushed to someone/policy." in output and files == local_files(user.folder / "out" / "w4a16")
    user.assert_deployed("out/w4a16")
    (code,) = re.findall("^```python\n(.*?)^```", files["README.md"].decode(), re.DOTALL | re.MULTILINE)
    (user.folder / "card.py").write_text(f"import sys\n\nsys.modules['trl_qarl'] = None\n{code}")
    assert "someone/policy" in code and "23 + 8 =" in user.run(sys.executable, "card.py", kind="plain")


def test_a_failed_push_of_a_launch_keeps_the_policy(user, hub):
    prepare(user, hub, "ddp", hub_strategy="end")
    hub.fault = fails_at("/commit/", 500)
    output = user.launch("ddp", code=3)
    assert "Training is complete, but not its push" in output and "hf upload someone/policy out/w4a16" in output
    hub.fault = lambda method, path: None
    user.assert_deployed("out/w4a16", engines=("transformers",))
