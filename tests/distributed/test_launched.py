import json
import os
import sys
from pathlib import Path

import pytest

from testing_utils import make_tiny_model, path_without
from testing_utils.children import start
from trl_qarl.rollout.server_process import free_port


CONFIGURATIONS = Path(__file__).parents[2] / "examples" / "accelerate_configs"


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.xdist_group("ddp")
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    "name",
    [
        # The other launches differ in what test_shards.py tries of them.
        pytest.param(name, marks=() if name in ("fsdp2_two_nodes", "deepspeed_zero3") else pytest.mark.nightly)
        for name in sorted(path.stem for path in CONFIGURATIONS.iterdir())
    ],
)
def test_two_processes_train_as_a_shipped_configuration_says(tmp_path, name):
    """With a launcher for each machine, all of them on this one."""
    if name.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    num_machines = 2 if name.endswith("two_nodes") else 1
    make_tiny_model(tmp_path, "qwen2")
    packages = ("vllm", "bitsandbytes") if name.startswith("deepspeed") else ("vllm", "bitsandbytes", "deepspeed")
    path = path_without(tmp_path, *packages)
    environment = {**os.environ, "PYTHONPATH": path, "TORCH_COMPILE_DISABLE": "1", "ACCELERATE_TORCH_DEVICE": "cpu"}
    launch = [sys.executable, "-m", "accelerate.commands.launch"]
    launch += ["--config_file", str(CONFIGURATIONS / f"{name}.yaml"), "--num_processes", "2"]
    launch += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())]
    script = [str(Path(__file__).with_name("launched.py")), str(tmp_path), name]
    logs = [(tmp_path / f"{rank}.log").open("w+") for rank in range(num_machines)]
    machines = [
        start([*launch, "--machine_rank", str(rank), *script], env=environment, stdout=log, stderr=log)
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [machine.wait(300) for machine in machines]
    finally:
        for machine in machines:
            # Its processes end with it, which they do not when it is killed.
            machine.terminate()
    assert set(codes) == {0}, [Path(log.name).read_text()[-3000:] for log in logs]
    first, second = (json.loads((tmp_path / f"{name}{rank}.json").read_text()) for rank in range(2))
    assert (first["machine"], second["machine"]) == (0, num_machines - 1)
    assert first["loss"] == second["loss"] and len(first["loss"]) == 1
