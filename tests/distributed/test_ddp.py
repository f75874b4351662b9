import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from testing_utils import fixed_completions, logged, make_tiny_model, make_trainer, relative_error
from testing_utils.hub_stand_in import StandInHub
from testing_utils.hub_stand_in import environment as hub_environment
from trl_qarl.objectives.trust_bands import estimate_bands
from trl_qarl.rollout.server_process import free_port


def train_on_two_processes(tmp_path, environment, runs, with_failures) -> tuple[dict[str, list[dict]], list[dict]]:
    """
    Train with `train_ddp.py`, once with each set of options. Returns what each rank wrote of it, and of the failures
    of `fail_ddp.py`: the same two processes, which take longer to import everything than to train.
    """
    model = make_tiny_model(tmp_path, "qwen2")
    output_dir = tmp_path / "out"
    output_dir.mkdir()
    launch = [sys.executable, str(Path(__file__).with_name("train_ddp.py")), model, str(output_dir), json.dumps(runs)]
    launch += ["fail"] * with_failures
    # The helpers of the tests, and this tree's package whatever else is installed.
    path = os.pathsep.join(map(str, Path(__file__).parents[1:3]))
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    result = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=1500)
    assert result.returncode == 0, result.stderr[-4000:]
    ranks = [json.loads((output_dir / f"rank{rank}.json").read_text()) for rank in range(2)]
    failed = [rank.pop("failed", {}) for rank in ranks]
    return {name: [rank[name] for rank in ranks] for name in runs}, failed


# Of the three updates after the checkpoint, the first has completions that were saved in it.
RESUMING = {"save_strategy": "steps", "save_steps": 1, "resume": "checkpoint-1"}
# Three epochs of two generation batches: resumed within the first batch of the second epoch.
EPOCHS = RESUMING | {"num_prompts": 4, "max_steps": 12, "resume": "checkpoint-5"}
# The bands of the last update are estimated from completions of before the checkpoint.
BANDS = RESUMING | {"trust_band": "auto", "trust_band_share": 0.5, "per_device_train_batch_size": 4}
BANDS |= {"resume": "checkpoint-3"}
# One update per batch: which of its sequences come first is chosen in each process.
ENGINE = {
    "numerics": "engine",
    "bf16": True,
    "fixed_completions": True,
    "steps_per_generation": 1,
    "max_steps": 2,
    "optim": "sgd",
    "learning_rate": 0.1,
}
LORA = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trainings on two processes, one after the other; their folder, what each rank wrote, what they pushed, and the
    failures."""
    tmp_path = tmp_path_factory.mktemp("ddp")
    runs = {"masters": RESUMING, "epochs": EPOCHS, "bands": BANDS, "engine": ENGINE}
    if find_spec("peft"):
        # Where the low-bit codes follow the adapter, they have to move.
        merged = {
            "lora_mode": "merged",
            "learning_rate": 1e-2,
            "optim": "adamw_torch",
            "hub_model_id": "someone/merged",
        }
        runs["adapter"] = {"lora": LORA, "hub_model_id": "someone/adapter", "hub_export": "both"} | RESUMING
        runs["merged"] = {"lora": LORA} | merged | RESUMING
    if has_vllm := find_spec("vllm") is not None:
        runs["server"] = {
            "scheme": "w8a16",
            "bf16": False,
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_autostart": True,
            "vllm_server_port": free_port(),
            # Where many share the cores, vLLM takes long to start.
            "vllm_server_timeout": 900,
            "vllm_max_model_length": 128,
        }
        runs["ahead"] = runs["server"] | {"rollout_ahead": 1, "max_steps": 6, "vllm_server_port": free_port()}
    with StandInHub(tmp_path / "hub") as hub:
        # What vLLM compiles in the server, for seconds, computes the same as what it does not.
        environment = hub_environment(hub, tmp_path / "home") | {"TORCH_COMPILE_DISABLE": "1"}
        ranks, failed = train_on_two_processes(tmp_path, environment, runs, has_vllm)
        yield tmp_path / "out", ranks, hub, failed


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.xdist_group("ddp")
# Everything happens in the fixture: on a machine that others use, too, that takes a while.
@pytest.mark.timeout(1800)
class TestTwoProcesses:
    def test_they_log_global_metrics(self, trained):
        folder, ranks, *_ = trained
        rows = [row for row in ranks["masters"][0]["rows"] if "loss" in row]
        assert len(rows) == 4
        for row in rows:
            assert math.isfinite(row["loss"]) and 0 <= row["quant/code_flip_rate"] <= 1
        assert rows[0]["tbpo/ratio/min"] <= rows[0]["tbpo/ratio/mean"] <= rows[0]["tbpo/ratio/max"]
        assert math.isfinite(rows[0]["mismatch/abs_logp_mean"])
        metrics, distributions = (folder / "masters" / f"{name}.jsonl" for name in ("metrics", "distributions"))
        logged = [json.loads(line) for line in metrics.read_text().splitlines()]
        assert [row["step"] for row in logged if "loss" in row] == [1, 2, 3, 4]
        histograms = [json.loads(line) for line in distributions.read_text().splitlines()]
        # Ratio and weight, of tokens and of sequences, for both signs of the advantage.
        assert len(histograms) == 4 * 8
        counted = [sum(row["counts"]) for row in histograms if row["name"] == "ratio"]
        # Two processes with two sequences each, of which only one with an advantage of 0 is not counted.
        assert [sum(counted[i : i + 2]) for i in range(0, 8, 2)] == [4, 4, 4, 4]

    def test_engine_numerics_train_what_they_train_on_one_process(self, trained, tmp_path):
        folder, ranks, *_ = trained
        ours, theirs = ranks["engine"]
        assert ours["digest"] == theirs["digest"]
        model = str(folder.parent / "qwen2")
        options = {key: value for key, value in ENGINE.items() if key != "fixed_completions"}
        prompts = Dataset.from_dict({"prompt": [f"{i} +" for i in range(16)]})
        one = make_trainer(model, tmp_path, train_dataset=prompts, rollout_func=fixed_completions, **options)
        before = [parameter.detach().clone() for parameter in one.model.parameters()]
        one.train()
        names = ("loss", "reward", "entropy", "grad_norm", "tbpo/ratio/mean", "mismatch/abs_logp_max")
        for name in names:
            logged_by_two = [row[name] for row in ours["rows"] if name in row]
            assert logged_by_two == pytest.approx(logged(one, name), rel=1e-2, abs=1e-6), name
        assert logged(one, "mismatch/abs_logp_max") == [0.0, 0.0]
        for start, alone, together in zip(
            before, one.model.parameters(), torch.load(folder / "engine" / "weights.pt"), strict=True
        ):
            # Backward rounds to bfloat16, and sums over other rows.
            assert relative_error(together - start, (alone - start).double()) < 2**-6

    @pytest.mark.parametrize("mode", ["masters", "bands", "adapter", "merged"])
    def test_they_train_the_same_weights(self, trained, mode):
        _, ranks, *_ = trained
        ours, theirs = ranks.get(mode) or pytest.skip("needs peft")
        assert ours["digest"] == theirs["digest"]
        if mode in ("adapter", "merged"):
            assert all(ours["moved"]) and len(ours["moved"]) == 2 * 2 * 7
            rates = [row["quant/code_flip_rate"] for row in ours["rows"] if "quant/code_flip_rate" in row]
            assert max(rates) > 0 if mode == "merged" else not rates

    def test_they_estimate_their_bands_from_the_completions_of_both(self, trained):
        _, ranks, *_ = trained
        ours, theirs = ranks["bands"]
        assert ours["window"] == theirs["window"]
        # The second update of the first batch: four completions in each process, none with an advantage of 0.
        assert [len(update) for update in ours["window"]] == [0, 8, 0, 8]
        estimated = estimate_bands(*torch.tensor(ours["window"][1]).unbind(1), 0.5)
        assert math.isfinite(estimated.positive_epsilon_high)
        for rank in (ours, theirs):
            last = [row for row in rank["resumed_rows"] if "loss" in row][-1]
            # A sign of which there are too few completions has no bound, and logs none.
            for name, offset in estimated._asdict().items():
                assert last.get(f"tbpo/band/{name.replace('_epsilon', '')}", math.inf) == offset

    @pytest.mark.parametrize("mode", ["masters", "epochs", "bands", "adapter", "merged"])
    def test_they_go_on_from_a_checkpoint_as_if_they_had_not_ended(self, trained, mode):
        _, ranks, *_ = trained
        for rank in ranks.get(mode) or pytest.skip("needs peft"):
            assert rank["resumed_digest"] == rank["digest"] != rank["digest_before_resuming"]
            whole, resumed = (
                [row["reward"] for row in rank[of] if "reward" in row] for of in ("rows", "resumed_rows")
            )
            assert len(whole) == (6 if mode == "epochs" else 2) and resumed == whole

    @pytest.mark.parametrize("mode", ["adapter", "merged"])
    def test_one_of_them_pushes(self, trained, mode):
        pytest.importorskip("peft")
        folder, _, hub, _ = trained
        # The adapter's masters have a repository of their own.
        assert [len(repo.commits) for repo in hub.repos.values()] == [2, 2, 2], "an empty one, and what was pushed"
        pushed = hub.files(f"someone/{mode}")
        assert sum("/commit/" in request for request in hub.requests) == 3
        local = folder / mode / "w4a16"
        names = {path.relative_to(local).as_posix() for path in local.rglob("*") if path.is_file()}
        assert names == pushed.keys() - {".gitattributes"}
        assert "model.safetensors" in names and ("adapter/adapter_model.safetensors" in names) == (mode == "adapter")
        assert all((local / name).read_bytes() == pushed[name] for name in names)

    @pytest.mark.vllm
    @pytest.mark.parametrize(("mode", "versions"), [("server", [0, 2]), ("ahead", [0, 0, 2])])
    def test_they_share_one_server(self, trained, mode, versions):
        pytest.importorskip("vllm")
        _, runs, *_ = trained
        ranks = runs[mode]
        assert ranks[0]["digest"] == ranks[1]["digest"]
        rows = [row for row in ranks[0]["rows"] if "rollout/weight_version" in row]
        assert [row["rollout/weight_version"] for row in rows] == versions
        assert max(row["mismatch/abs_logp_max"] for row in rows) < 1e-5

    @pytest.mark.vllm
    def test_what_fails_on_one_process_ends_both_with_a_checkpoint(self, trained):
        pytest.importorskip("vllm")
        *_, ranks = trained
        expected = {"publish": "a tensor differs", "generate": "RuntimeError: out of memory", "nan": "NaN"}
        for name, message in expected.items():
            for rank in ranks:
                raised = rank[name]["raised"]
                assert raised.startswith("EngineLost: ") and message in raised, (name, rank[name])
                files = {"trainer_state.json", "model.safetensors", "rollout_state_0.pt", "rollout_state_1.pt"}
                assert files <= set(rank[name]["files"]), name
        assert ranks[1]["start"]["raised"] == "ValueError: a port is taken"
        assert ranks[0]["start"]["raised"].startswith("RuntimeError: Another process failed with ValueError")
