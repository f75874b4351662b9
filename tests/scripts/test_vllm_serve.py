import json
import os
import socket
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from testing_utils import make_mixture, make_tiny_model, make_tiny_tokenizer, refused
from testing_utils.pictures import make_picture_config, make_picture_model
from trl_qarl import QaRLConfig, export_checkpoint, prepare_model
from trl_qarl.adapters.tensors import arguments_for
from trl_qarl.checkpoint.layout import quantization_config
from trl_qarl.cli import main
from trl_qarl.engines.server_command import build_server_command
from trl_qarl.engines.spec import EngineSpec
from trl_qarl.quantization import gemm
from trl_qarl.quantization.inventory import Inventory
from trl_qarl.scripts import vllm_serve
from trl_qarl.trainer import qarl_config
from trl_qarl.wire.handshake import TOKEN_FILE_VARIABLE, make_token_file, read_token_file


def option(argv, name):
    return argv[argv.index(name) + 1]


@pytest.fixture
def printed(capsys):
    """The command that starts the server of a model with these options."""

    def run(model, *options):
        assert main(["vllm-serve", "--model", str(model), "--print_command", *options]) == 0
        return capsys.readouterr().out

    return run


def play_gpu(monkeypatch, capability, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)


def test_a_server_starts_with_the_adapters_rank_and_layers(tmp_path, printed):
    argv, _ = build_server_command(EngineSpec("m", lora=arguments_for(16, ["o_proj", "q_proj"])))
    assert "--enable-lora" in argv and option(argv, "--max-loras") == "1" and option(argv, "--max-lora-rank") == "16"
    start = argv.index("--lora-target-modules") + 1
    assert argv[start : start + 2] == ["o_proj", "q_proj"]
    assert not any("lora" in argument for argument in build_server_command(EngineSpec("m"))[0])

    model = make_tiny_model(tmp_path)
    command = printed(model, "--max_lora_rank", "8", "--dtype", "float32")
    assert " --dtype float32 " in command
    assert "--lora-target-modules down_proj gate_proj k_proj o_proj q_proj up_proj v_proj" in command
    # A low-bit checkpoint as the adapter's base: its own scheme counts.
    learner = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prepare_model(learner, "w8a8", scale_dtype=torch.float32)
    folder = str(export_checkpoint(learner, tmp_path / "low", dtype=torch.float32))
    assert '"num_bits": 8' in printed(folder, "--max_lora_rank", "8")


@pytest.mark.parametrize(("has_bf16", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_server_and_trainer_have_one_default_dtype(tmp_path, printed, monkeypatch, has_bf16, dtype):
    for module in (gemm, qarl_config):
        monkeypatch.setattr(module, "has_fast_bf16", lambda: has_bf16)
    assert f" --dtype {dtype} " in printed(make_tiny_model(tmp_path))
    assert QaRLConfig(str(tmp_path)).bf16 == (dtype == "bfloat16")


@pytest.mark.parametrize(
    ("options", "swap"),
    [
        (["--scheme", "w4a16"], {"scheme": "w4a16"}),
        (["--scheme", "fp8", "--exclude_modules", "o_proj"], {"scheme": "fp8", "exclude_modules": ["o_proj"]}),
        (["--exclude_modules", r".*\.0\..*_proj"], {"scheme": "w4a16", "exclude_modules": r".*\.0\..*_proj"}),
    ],
)
def test_the_engine_is_quantized_as_the_learner_will_be(tmp_path, printed, options, swap):
    # 192 = 1.5 * 128: some layers fall back to a smaller group.
    path = make_tiny_model(tmp_path, "qwen3", hidden_size=192, intermediate_size=320)
    command = printed(path, *options)
    model = AutoModelForCausalLM.from_pretrained(path)
    prepare_model(model, **swap)
    assert json.dumps({"quantization_config": quantization_config(Inventory.of(model))}) in command


@pytest.mark.parametrize("kind", ["idefics3", "qwen2_5_vl"])
def test_the_vision_tower_is_served_in_high_precision(tmp_path, printed, kind):
    make_picture_config(kind).save_pretrained(tmp_path)
    command = printed(tmp_path, "--scheme", "w8a16")
    model = make_picture_model(kind)
    prepare_model(model, "w8a16")
    config = quantization_config(Inventory.of(model))
    assert json.dumps({"quantization_config": config}) in command and any("vis" in name for name in config["ignore"])
    # Names of the tower's layers, such as "0", would also match modules that vLLM cannot adapt.
    targets = " --lora-target-modules down_proj gate_proj k_proj o_proj q_proj up_proj v_proj --"
    assert targets in printed(tmp_path, "--scheme", "w8a16", "--max_lora_rank", "8")
    assert "--enable-scale-out" in command and "--no-mm-device-do-normalize" in command


def test_unquantized_needs_no_overrides(tmp_path, printed):
    command = printed(make_tiny_model(tmp_path), "--scheme", "bf16", "--seed", "3")
    assert "--hf-overrides" not in command and command.rstrip().endswith("--seed 3")


def test_an_address_others_can_reach_warns(tmp_path, capsys, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    path = make_tiny_model(tmp_path)
    arguments = ["vllm-serve", "--model", path, "--transfer_dir", str(tmp_path / "transfer")]
    main([*arguments, "--host", "0.0.0.0"])
    assert "--host 0.0.0.0 lets other machines" in capsys.readouterr().err
    main(arguments)
    assert "warning" not in capsys.readouterr().err
    assert len(started) == 2


@pytest.mark.parametrize("transport", ["file", "nccl"])
@pytest.mark.parametrize("named", [True, False])
def test_the_secret_is_in_a_file_and_in_no_command(tmp_path, capsys, monkeypatch, transport, named):
    started, directory, token_file = [], tmp_path / "shared memory", tmp_path / "my token"
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    play_gpu(monkeypatch, (9, 0), "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: transport == "nccl")
    monkeypatch.setattr(vllm_serve, "default_transfer_dir", lambda *arguments: directory)
    arguments = ["vllm-serve", "--model", make_tiny_model(tmp_path), "--scheme", "bf16"]
    arguments += ["--token_file", str(token_file)] if named else []
    arguments += ["--transfer_dir", str(directory)] if transport == "file" else ["--transport", "nccl"]
    for _ in range(2):
        main(arguments)
    (_, argv, environment), (_, _, again) = started
    path = Path(environment[TOKEN_FILE_VARIABLE])
    assert path == (token_file if named else directory / "token")
    assert path.stat().st_mode & 0o777 == 0o600
    assert again[TOKEN_FILE_VARIABLE] == str(path)
    token = read_token_file(path)
    assert token not in str((argv, environment)) + capsys.readouterr().out


def test_a_token_file_that_others_can_read_starts_no_server(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "execve", lambda *arguments: pytest.fail("started"))
    path = tmp_path / "token"
    make_token_file(path)
    path.chmod(0o644)
    arguments = ["--model", make_tiny_model(tmp_path), "--scheme", "bf16", "--token_file", str(path)]
    said = refused(capsys, "vllm-serve", *arguments, "--transfer_dir", str(tmp_path / "transfer"))
    assert "has mode 0644" in said


@pytest.mark.parametrize(("host", "said"), [("127.0.0.1", "Address already in use"), ("nowhere.invalid", "not known")])
def test_an_address_where_no_server_can_listen_is_named(tmp_path, capsys, monkeypatch, host, said):
    monkeypatch.setattr(os, "execve", lambda *arguments: pytest.fail("started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = ["--model", make_tiny_model(tmp_path), "--host", host, "--port", str(taken.getsockname()[1])]
        error = refused(capsys, "vllm-serve", *arguments, "--transfer_dir", str(tmp_path / "transfer"))
    assert said in error and error.endswith("Change `--host` or `--port`.\n") and not (tmp_path / "transfer").exists()


@pytest.mark.parametrize("is_there", [True, False])
def test_one_message_has_all_that_is_wrong(tmp_path, capsys, is_there):
    words = ["--port", "0", "--group_size", "7", "--max-model-len", "513", "--kv-cache-dtype", "fp8", "-tp", "0"]
    said = refused(capsys, "vllm-serve", "--model", make_tiny_model(tmp_path) if is_there else "./nowhere", *words)
    problems = ["--kv-cache-dtype is set", "--port=0 is not", "--tensor-parallel-size=0 must", "group_size=7 is not"]
    problems += ["--max-model-len=513 with"] if is_there else ["./nowhere is not a folder"]
    assert "trl-qarl: error: 5 problems:" in said and all(each in said for each in problems)


def test_a_scheme_unfit_for_the_gpu_ends_the_command(tmp_path, monkeypatch, capsys):
    play_gpu(monkeypatch, (8, 0), "NVIDIA A100")
    said = refused(capsys, "vllm-serve", "--model", make_tiny_model(tmp_path), "--scheme", "fp8", "--print_command")
    assert "scheme 'fp8' does not run on NVIDIA A100 (compute capability 8.0)" in said


@pytest.mark.parametrize("scheme", ["w8a8", "fp8"])
def test_ranks_that_round_activations_apart_are_refused(tmp_path, capsys, printed, scheme):
    path = make_tiny_model(tmp_path, "qwen2")
    printed(path, "--scheme", scheme)
    error = refused(capsys, "vllm-serve", "--model", path, "--scheme", scheme, "--print_command", "-tp", "2")
    assert "tensor_parallel_size=2 with 8-bit activations" in error and "--data-parallel-size" in error


def test_ranks_that_split_a_group_are_refused(tmp_path, capsys):
    model = make_mixture("qwen3_moe")
    model.save_pretrained(tmp_path)
    make_tiny_tokenizer().save_pretrained(tmp_path)
    command = ["vllm-serve", "--model", str(tmp_path), "--scheme", "w4a16", "--print_command"]
    for size, group_size, message in (
        (2, 64, "experts has 64 inputs. Use tensor_parallel_size 1, or group_size 32."),
        (4, 32, "experts has 64 inputs. Use tensor_parallel_size 1 or 2."),
    ):
        error = refused(capsys, *command, "--group_size", str(group_size), "--tensor-parallel-size", str(size))
        assert f"tensor_parallel_size={size} splits groups of {group_size}" in error and message in error, error
    assert main([*command, "--group_size", "32", "--tensor-parallel-size", "2"]) == 0


def test_a_folder_for_all_users_takes_no_weights(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(vllm_serve.os, "execve", lambda *args: pytest.fail("started"))
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    model = make_tiny_model(tmp_path, "qwen2")
    said = refused(capsys, "vllm-serve", "--model", model, "--transfer_dir", str(shared), "--transport", "file")
    assert f"such as {shared}/weights" in said and "chmod" not in said
