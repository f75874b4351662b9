import json
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torchao.optim.subclass_8bit import OptimState8bit
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from testing_utils import launch_environment, make_tiny_mixture, make_tiny_model, make_trainer
from testing_utils.live_bytes import LiveBytes, give_completions
from testing_utils.trainings import lora
from trl_qarl import QaRLConfig, cli
from trl_qarl.doctor import memory
from trl_qarl.doctor.memory import (
    MemorySettings,
    check_host_memory,
    launch_configuration,
    memory_of_machine,
    on_gpu,
    on_host,
    parts_of_memory,
)
from trl_qarl.quantization.formats import int4_packed
from trl_qarl.quantization.plan import get_plan
from trl_qarl.quantization.swap import quantized_layers
from trl_qarl.quantization.tensors import LowBitTensor
from trl_qarl.quantization.versions import kept_version
from trl_qarl.scripts import estimate


ROOT = Path(__file__).parents[2]


def shapes_of(folder):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def calculate(folder, *processes, **options):
    """Memory of a training in `w4a16`, by launch and part."""
    return parts_of_memory(shapes_of(folder), get_plan("w4a16"), [MemorySettings(*processes, **options)])[0]


class Gradients(TrainerCallback):
    num_bytes = 0

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.num_bytes = sum(p.grad.nbytes for p in model.parameters() if p.requires_grad)


def state_of(trainer):
    state = [value for values in trainer.optimizer.state.values() for value in values.values()]
    # Of a state in 8 bits without its table of values, 1 kB.
    return sum(v.codes.nbytes + v.scale.nbytes if isinstance(v, OptimState8bit) else v.nbytes for v in state)


@pytest.mark.parametrize(
    ("optim", "rank"),
    [("muon", 0), ("muon_8bit", 0), ("adamw_torch", 0), ("adamw_torch_fused", 0), ("muon", 8), ("muon_8bit", 8)],
)
def test_the_state_takes_what_was_calculated(tiny_model, tmp_path, optim, rank):
    gradients, adapter = Gradients(), lora(r=rank) if rank else None
    dtype = "bfloat16" if optim == "muon_8bit" else "float32"
    options = {"max_steps": 1, "optim": optim, "bf16": True, "peft_config": adapter, "gradient_dtype": dtype}
    trainer = make_trainer(tiny_model, tmp_path, callbacks=[gradients], **options)
    trainer.train()
    size = 2 if dtype == "bfloat16" else 4
    parts = calculate(tiny_model, 1, optim, lora_rank=rank, rollout_ahead=1, gradient_bytes=size)["ddp"]
    kept = kept_version(trainer.model)
    weights = [layer.low_bit_weight() for layer in quantized_layers(trainer.model).values()]
    low_bit = sum(part.nbytes for weight in weights for part in weight.parts())
    measured = {
        "masters": sum(p.nbytes for p in trainer.model.parameters() if not isinstance(p, LowBitTensor)),
        "gradients": gradients.num_bytes,
        "optimizer": state_of(trainer),
        "low-bit weights": low_bit,
        "kept weights": sum(part.nbytes for w in kept.low_bit.values() for part in w.parts())
        + sum(w.nbytes for w in kept.others.values()),
    }
    for name, value in measured.items():
        assert parts[name] == pytest.approx(value, rel=1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_sequences", "shape"),
    [
        (4, {"hidden_size": 128, "intermediate_size": 384, "vocab_size": 2048}),
        (8, {"hidden_size": 128, "intermediate_size": 768, "vocab_size": 512}),
    ],
)
def test_the_peak_is_what_was_calculated(tmp_path, num_sequences, shape):
    model, live = make_tiny_model(tmp_path, "qwen2", **shape), LiveBytes()
    # The prompt that all completions share is computed once.
    num_tokens = 4 + 60 * num_sequences
    options = {"per_device_train_batch_size": num_sequences, "num_generations": num_sequences, "bf16": True}
    # Gradients and state of an update are there in the second micro-batch of the next one.
    options |= {"gradient_accumulation_steps": 2, "max_steps": 2, "rollout_func": give_completions}
    # Else it is counted where no test has made it before.
    int4_packed._table.cache_clear()
    with live:
        trainer = make_trainer(model, tmp_path, **options)
        trainer.model.model.norm.register_full_backward_pre_hook(lambda *args: setattr(live, "phase", "layers"))
        trainer.model.register_forward_pre_hook(lambda *args: setattr(live, "phase", "head"))
        for parameter in trainer.model.parameters():
            live.add(parameter.detach())
        trainer.train()
    parts = calculate(model, 1, "adamw_torch", num_tokens=num_tokens)["ddp"] | {"weight sync": 0}
    # With which codes are unpacked on a CPU.
    parts["table"] = 2**20
    without_head = on_gpu(parts) - parts["logits"]
    assert without_head == pytest.approx(live.peaks["layers"], rel=0.1)
    # A GPU turns a tile of the logits into its gradient in place; a CPU has seven others of float32, and one of
    # booleans.
    on_cpu = 29 * num_tokens * shape["vocab_size"]
    assert on_gpu(parts) + on_cpu == pytest.approx(live.peaks["head"], rel=0.1)


def test_memory_on_the_pages_of_the_documentation_is_calculated():
    what_fits = runpy.run_path(str(ROOT / "benchmarks" / "what_fits.py"))
    page = (ROOT / "docs" / "sharding.md").read_text()
    rows = page[page.index("| Qwen3-1.7B |") :].splitlines()
    assert rows[3].startswith("|  | 8 |")
    assert rows[3] == what_fits["row"]("Qwen3-1.7B", 8), "run `python benchmarks/what_fits.py --fill docs/sharding.md`"
    for name, share, memory_of_gpu, launch in (
        ("8b_24gb", 0.4, 24, "fsdp2_offload"),
        ("8b_80gb", 0.25, 80, "ddp"),
        ("32b_80gb", 0.4, 80, "fsdp2_offload"),
    ):
        [(gpu, host)] = re.findall(rf"^\| `{name}[.]yaml` .* \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
        run = MemorySettings(1, "muon_8bit", engine_bytes=int(share * memory_of_gpu * 1e9), gradient_bytes=2)
        model = what_fits["shapes_of"](f"Qwen3-{name.partition('b')[0]}B")
        parts = parts_of_memory(model, get_plan("w4a16"), [run])[0][launch]
        assert (f"{on_gpu(parts, True) / 1e9:.1f}", f"{on_host(parts) / 1e9:.1f}") == (gpu, host), name


def test_each_gpu_holds_its_part_with_fsdp2(tiny_model):
    alone, four = (calculate(tiny_model, n) for n in (1, 4))
    for name in ("masters", "gradients", "optimizer", "low-bit weights"):
        assert four["fsdp2"][name] == pytest.approx(alone["ddp"][name] / 4, rel=1e-3)
        assert four["ddp"][name] == alone["ddp"][name]
    adding = calculate(tiny_model, 4, accumulates=True)
    assert adding["fsdp2"] == four["fsdp2"] | {"gradients": alone["ddp"]["gradients"]} and adding["ddp"] == four["ddp"]
    with pytest.raises(ValueError, match="optim='sgd'"):
        calculate(tiny_model, 1, "sgd")


@pytest.fixture
def estimated(tiny_model, capsys):
    """Runs the command with these options to its exit code; returns its output."""

    def run(model=tiny_model, code=0, **options):
        options = {"tokens": 64, "vllm_gpu_memory_utilization": 0} | options
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))[: 1 + (value != "")]]
        assert cli.main(["estimate", model, *words]) == code
        return capsys.readouterr().out

    return run


def settings_of_fsdp(launch):
    return {name: value for name, value in launch_environment(launch).items() if "FSDP" in name}


def test_the_command_names_and_writes_the_first_launch_that_fits(tiny_model, estimated, tmp_path):
    path = tmp_path / "launch.yaml"
    assert "Launch with ddp, a server elsewhere:" in estimated(gpus=8, gpu_memory=1, write=path)
    assert yaml.safe_load(path.read_text()) == launch_configuration("ddp", 8)
    parts = calculate(tiny_model, 8, num_tokens=64)
    of_ddp, of_fsdp2 = (on_gpu(parts[launch]) / 1e9 for launch in ("ddp", "fsdp2"))
    assert of_fsdp2 < of_ddp
    # Enough to load the model, and too little for masters.
    options = {"gpus": 8, "host_memory": 1.01 * on_host(parts["fsdp2"]) / 1e9}
    out = estimated(**options, gpu_memory=(of_ddp + of_fsdp2) / 2, write=path)
    assert "Launch with fsdp2, a server" in out
    # What is shipped, for 8 GPUs, is the same.
    assert settings_of_fsdp(path) == settings_of_fsdp("fsdp2.yaml")
    out = estimated(**options, gpu_memory=of_fsdp2 * 0.99, code=1)
    (enough,) = re.findall(r"Nothing fits. Use --gpus (\d+) \(fits with fsdp2\)", out)
    estimated(**options | {"gpus": enough}, gpu_memory=of_fsdp2 * 0.99)
    assert "GB on each of 8 GPUs" in out and re.search(r"^ +ddp +fsdp2 +fsdp2_offload$", out, re.MULTILINE)
    for name in ("masters", "optimizer", "total"):
        assert re.search(rf"^{name}( +\d+\.\d){{3}}$", out, re.MULTILINE)
    # Beside LoRA, a frozen base takes less.
    parts = calculate(tiny_model, 8, num_tokens=64, lora_rank=8)
    less = on_gpu(parts["fsdp2"]) / 1e9
    assert less < of_fsdp2
    out = estimated(**options, gpu_memory=of_fsdp2 * 1.001, gradient_accumulation_steps=2, code=1)
    assert "sync_each_batch" in out
    options["host_memory"] = 1.01 * on_host(parts["fsdp2"]) / 1e9
    estimated(**options, gpu_memory=less * 1.001, use_peft="", lora_r=8)


@pytest.mark.parametrize(("gpus", "launch"), [(8, "fsdp2"), (1, "ddp")])
def test_rounded_gradients_are_not_launched_with_ddp(estimated, gpus, launch):
    said = estimated(gpus=gpus, gpu_memory=24, optim="muon_8bit", gradient_dtype="bfloat16")
    assert f"Launch with {launch}" in said and ("  ddp 0" in said) == (launch == "ddp")


def test_gpus_are_divided_between_learner_and_server(tiny_model, estimated, tmp_path):
    two, three = (on_gpu(calculate(tiny_model, n, num_tokens=64)["fsdp2"]) / 1e9 for n in (2, 3))
    # Colocated engines take too much, and two GPUs of the learner too little; a tenth is kept in reserve.
    options = {"gpus": 8, "gpu_memory": 1.101 * three, "vllm_gpu_memory_utilization": 0.9, "host_memory": 0.02}
    assert options["gpu_memory"] < two
    out = estimated(**options, write=tmp_path / "launch.yaml")
    assert "Launch with fsdp2 on 3 GPUs, 3 of the GPUs, and a server on 5:" in out
    serve = f"trl-qarl vllm-serve --model {tiny_model} --scheme w4a16 --max-model-len 64 --data-parallel-size 5"
    assert f"CUDA_VISIBLE_DEVICES=3,4,5,6,7 {serve}\n" in out
    assert yaml.safe_load((tmp_path / "launch.yaml").read_text()) == launch_configuration("fsdp2", 3)


def test_the_learner_gets_what_a_server_cannot_use(estimated, monkeypatch):
    """A server on two of five GPUs."""
    monkeypatch.setattr(estimate, "_server", lambda model, num_left, served: (1, 1, 2) if num_left >= 2 else None)
    out = estimated(gpus=5, gpu_memory=1, vllm_gpu_memory_utilization=0.3)
    assert re.findall(r"(\d) of the GPUs", out) == ["3"]


def test_masters_that_cannot_be_sharded_are_not(estimated, tmp_path):
    mixture = make_tiny_mixture(tmp_path, "gpt_oss")
    for options, is_sharded in (({}, False), ({"use_peft": ""}, True)):
        out = estimated(mixture, gpus=2, gpu_memory=10, vllm_gpu_memory_utilization=0.3, **options)
        assert (" fsdp2 0" in out) == is_sharded


@pytest.mark.parametrize(("tokens", "length"), [(64, 64), (4096, 512)])
def test_engines_take_no_longer_sequences_than_learners(estimated, tokens, length):
    """512 are the longest of this model."""
    out = estimated(gpu_memory=4, tokens=tokens, vllm_gpu_memory_utilization=0.3)
    assert f"--vllm_max_model_length {length} ..." in out


def test_a_mixture_has_several_servers(estimated, tmp_path):
    mixture = make_tiny_mixture(tmp_path)
    learner = calculate(mixture, 6, num_tokens=64)["fsdp2"]
    options = {"gpus": 8, "vllm_gpu_memory_utilization": 0.9, "host_memory": 0.02}
    out = estimated(mixture, **options, gpu_memory=1.101 * on_gpu(learner) / 1e9)
    assert "Launch with fsdp2 on 6 GPUs, 6 of the GPUs, and 2 servers on 2:" in out
    serve = f"trl-qarl vllm-serve --model {mixture} --scheme w4a16 --max-model-len 64 --port"
    assert f"CUDA_VISIBLE_DEVICES=6 {serve} 8000 --seed 0\n  CUDA_VISIBLE_DEVICES=7 {serve} 8001 --seed 1\n" in out
    assert "--vllm_server_base_url http://127.0.0.1:8000,http://127.0.0.1:8001 ..." in out


def test_masters_go_to_host_memory_where_gpus_are_small(tiny_model, estimated, tmp_path):
    path = tmp_path / "launch.yaml"
    parts = calculate(tiny_model, 1, num_tokens=64)
    small, large = (on_gpu(parts[launch]) / 1e9 for launch in ("fsdp2_offload", "ddp"))
    gpu_memory, host = (small + large) / 2, on_host(parts["fsdp2_offload"]) / 1e9
    out = estimated(gpu_memory=gpu_memory, host_memory=1.01 * host, write=path)
    assert "Launch with fsdp2_offload, a server elsewhere:" in out
    assert settings_of_fsdp(path) == settings_of_fsdp("fsdp2_offload.yaml")
    estimated(gpu_memory=gpu_memory, host_memory=0.99 * host, code=1)


def test_a_sleeping_engine_leaves_its_memory_to_updates():
    parts = {"masters": 3, "gradients": 20, "optimizer": 0, "low-bit weights": 1, "kept weights": 0, "weight sync": 0}
    assert on_gpu(parts | {"engine": 8}) == 32
    assert on_gpu(parts | {"engine": 8}, is_asleep=True) == 24
    assert on_gpu(parts | {"engine": 30, "host masters": 5}, is_asleep=True) == 34


def test_pinned_blocks_are_powers_of_two(tiny_model):
    """Masters and rounded gradients of an unquantized model, in three processes, which pin the same number of rows."""
    run = MemorySettings(3, gradient_bytes=2)
    parts = parts_of_memory(shapes_of(tiny_model), get_plan("bf16"), [run])[0]["fsdp2_offload"]
    shards = [-(-len(p) // 3) * p[0].numel() for p in shapes_of(tiny_model).parameters()]
    blocks = [2 ** math.ceil(math.log2(size * number)) for number in shards for size in (4, 2)]
    assert parts["host masters"] + parts["host gradients"] + parts["host rounding"] == 3 * sum(blocks)


def test_too_little_host_memory_is_named_before_loading(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    args = QaRLConfig(str(tmp_path), use_cpu=True)
    parts = calculate(tiny_model, 1)["fsdp2_offload"]
    for factor, is_enough in ((1.01, True), (0.99, False)):
        monkeypatch.setattr(memory, "memory_of_machine", lambda factor=factor: factor * on_host(parts))
        if is_enough:
            check_host_memory(args, tiny_model, None)
        else:
            with pytest.raises(ValueError, match=r"needs .* GB of host memory \(masters .*optim='muon_8bit'"):
                check_host_memory(args, tiny_model, None)
    assert memory_of_machine() > 2**28


def test_the_command_names_the_gpu_kernel(estimated):
    options = {"gpu_memory": 80, "scheme": "fp8", "vllm_gpu_memory_utilization": 0.3}
    said = "ok       vLLM runs fp8 by CutlassFP8ScaledMMLinearKernel"
    assert said in estimated(**options, gpu_capability="9.0")
    said = "error    fp8 must not run in vLLM on this GPU"
    assert said in estimated(**options, gpu_capability="8.0", code=1)


ASKS_NO_ONE = """
import socket, sys
from trl_qarl.cli import main


def find(host, *args, **kwargs):
    print("asked", host)
    raise socket.gaierror(-2, "Name or service not known")


socket.getaddrinfo = find
sys.exit(main(["estimate", sys.argv[1], "--gpu_memory", "24", "--trust_remote_code"]))
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_the_hub_is_asked_nothing_about_a_local_folder(tiny_model, tmp_path):
    """Here by a configuration that names code on the Hub: transformers would try again for a minute."""
    config = json.loads(Path(tiny_model, "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "org/code--configuration.Config"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    command = [sys.executable, "-c", ASKS_NO_ONE, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and f"MODEL {tmp_path}" in done.stderr
