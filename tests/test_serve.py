import json
import os
from pathlib import Path

import pytest
from torch import nn
from transformers import AutoModelForCausalLM

from testing_utils import make_tiny_model
from trl_qarl import prepare_model
from trl_qarl.cli import main
from trl_qarl.export import quantization_config
from trl_qarl.rollout.gate import TRANSFER_DIR_VARIABLE
from trl_qarl.rollout.handshake import TOKEN_FILE_VARIABLE, make_token_file, read_token_file
from trl_qarl.rollout.serve import build_server_command, make_transfer_dir
from trl_qarl.scripts import vllm_serve


def option(argv, name):
    return argv[argv.index(name) + 1]


def test_the_command_holds_everything_a_trainer_needs():
    scheme = {"quant_method": "compressed-tensors"}
    argv, environment = build_server_command("some/model", scheme, port=8001, vllm_args=["--max-model-len", "4096"])
    assert argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert option(argv, "--model") == "some/model"
    assert option(argv, "--host") == "127.0.0.1" and option(argv, "--port") == "8001"
    assert option(argv, "--load-format") == "dummy"
    assert json.loads(option(argv, "--hf-overrides")) == {"quantization_config": scheme}
    assert option(argv, "--logprobs-mode") == "processed_logprobs"
    assert json.loads(option(argv, "--weight-transfer-config")) == {"backend": "qarl_nccl"}
    assert option(argv, "--middleware").endswith("PublicationGate")
    assert option(argv, "--max-model-len") == "4096"
    assert environment == {"VLLM_SERVER_DEV_MODE": "1"}


def test_on_a_cpu_weights_go_through_files(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    argv, environment = build_server_command("m", None, on_cpu=True, transfer_dir="/shared/dir")
    assert json.loads(option(argv, "--weight-transfer-config")) == {"backend": "qarl"}
    assert "--enforce-eager" in argv and "--hf-overrides" not in argv
    assert environment[TRANSFER_DIR_VARIABLE] == "/shared/dir"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind" and environment["VLLM_CPU_KVCACHE_SPACE"] == "7"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"transport": "nccl", "on_cpu": True}, "needs GPUs on both sides"),
        ({"transport": "mpi"}, "Choose 'file' or 'nccl'"),
        ({"vllm_args": ["--load-format", "auto"]}, "weights come from the trainer"),
        ({"vllm_args": ["--logprobs_mode=raw_logprobs"]}, "after temperature"),
        ({"vllm_args": ["--api-server-count", "4"]}, "one API process"),
    ],
)
def test_what_would_break_publication_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_server_command("m", None, **arguments)


@pytest.mark.parametrize(
    ("dtype", "on_cpu", "message"),
    [
        ("bfloat16", True, "w4a8.*cannot roll out in vLLM on a CPU.*`use_vllm=False`"),
        ("float16", False, "not in float16"),
    ],
)
def test_w4a8_is_refused_where_vllm_computes_something_else(dtype, on_cpu, message):
    model = nn.Sequential(nn.Linear(128, 128))
    prepare_model(model, "w4a8")
    config = quantization_config(model)
    with pytest.raises(ValueError, match=message):
        build_server_command("m", config, dtype=dtype, on_cpu=on_cpu)
    assert build_server_command("m", config)  # bfloat16 on a GPU
    prepare_model(other := nn.Sequential(nn.Linear(128, 128)), "w4a16")
    assert build_server_command("m", quantization_config(other), dtype=dtype, on_cpu=on_cpu)


@pytest.mark.parametrize(
    ("options", "swap"),
    [
        (["--scheme", "w4a16"], {"scheme": "w4a16"}),
        (
            ["--scheme", "fp8", "--exclude_modules", "o_proj", "down_proj"],
            {"scheme": "fp8", "exclude_modules": ["o_proj", "down_proj"]},
        ),
    ],
)
def test_the_engine_is_quantized_as_the_learner_will_be(tmp_path, capsys, options, swap):
    # 192 = 1.5 * 128: some layers fall back to a smaller group.
    path = make_tiny_model(tmp_path, "qwen3", hidden_size=192, intermediate_size=320)
    assert main(["vllm-serve", "--model", path, "--print_command", *options]) == 0
    command = capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(path)
    prepare_model(model, **swap)
    assert json.dumps({"quantization_config": quantization_config(model)}) in command


def test_unquantized_needs_no_overrides(tmp_path, capsys):
    path = make_tiny_model(tmp_path)
    assert main(["vllm-serve", "--model", path, "--scheme", "bf16", "--print_command", "--seed", "3"]) == 0
    command = capsys.readouterr().out
    assert "--hf-overrides" not in command and command.rstrip().endswith("--seed 3")


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5"])
def test_an_address_others_can_reach_warns(tmp_path, capsys, monkeypatch, host):
    started = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    path = make_tiny_model(tmp_path)
    arguments = ["vllm-serve", "--model", path, "--transfer_dir", str(tmp_path / "transfer")]
    main([*arguments, "--host", host])
    assert f"--host {host} lets other machines" in capsys.readouterr().err
    main(arguments)
    assert "warning" not in capsys.readouterr().err
    assert len(started) == 2


@pytest.mark.parametrize("transport", ["file", "nccl"])
@pytest.mark.parametrize("named", [True, False])
def test_the_secret_is_in_a_file_and_in_no_command(tmp_path, capsys, monkeypatch, transport, named):
    import torch

    started, directory, token_file = [], tmp_path / "shared memory", tmp_path / "my token"
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: transport == "nccl")
    monkeypatch.setattr(vllm_serve, "default_transfer_dir", lambda port: directory)
    arguments = ["vllm-serve", "--model", make_tiny_model(tmp_path), "--scheme", "bf16"]
    arguments += ["--token_file", str(token_file)] if named else []
    arguments += ["--transfer_dir", str(directory)] if transport == "file" else []
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
    arguments = ["vllm-serve", "--model", make_tiny_model(tmp_path), "--scheme", "bf16", "--token_file", str(path)]
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--transfer_dir", str(tmp_path / "transfer")])
    assert "has mode 0644" in capsys.readouterr().err


def test_a_wrong_setting_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["vllm-serve", "--model", make_tiny_model(tmp_path), "--group_size", "7"])
    assert "group_size=7 is not supported" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["vllm-serve", "--model", str(tmp_path / "nowhere")])
    assert capsys.readouterr().err.startswith("trl-qarl: error:")


def test_the_transfer_directory_is_its_owners_alone(tmp_path):
    directory = tmp_path / "transfer"
    make_transfer_dir(directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    make_transfer_dir(directory)
