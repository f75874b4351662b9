import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import shared_memory
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from testing_utils import make_tiny_model
from trl_qarl import export_checkpoint, prepare_model
from trl_qarl.checkpoint.layout import quantization_config
from trl_qarl.cli import main
from trl_qarl.rollout import server_process as serve
from trl_qarl.rollout.server_command import build_server_command
from trl_qarl.rollout.server_process import ServerProcess, free_port
from trl_qarl.scripts import vllm_serve
from trl_qarl.wire import transfer_dir
from trl_qarl.wire.handshake import TOKEN_FILE_VARIABLE, make_token_file, read_token_file
from trl_qarl.wire.protocol import TRANSFER_DIR_VARIABLE
from trl_qarl.wire.transfer_dir import owned_prefix


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
    # Not a default: with AMX, vLLM would round activations.
    for name in ("VLLM_CPU_INT4_W4A8", "VLLM_CPU_ATTN_SPLIT_KV"):
        monkeypatch.setenv(name, "1")
        assert build_server_command("m", None, on_cpu=True)[1][name] == "0"


def test_a_server_for_an_adapter_is_started_with_its_rank_and_layers(tmp_path, capsys):
    argv, _ = build_server_command("m", None, max_lora_rank=16, lora_modules=["o_proj", "q_proj"])
    assert "--enable-lora" in argv and option(argv, "--max-loras") == "1" and option(argv, "--max-lora-rank") == "16"
    start = argv.index("--lora-target-modules") + 1
    assert argv[start : start + 2] == ["o_proj", "q_proj"]
    assert not any("lora" in argument for argument in build_server_command("m", None)[0])

    def printed(*options):
        parser = vllm_serve.make_parser("trl-qarl vllm-serve")
        assert vllm_serve.main(*parser.parse_known_args([*options, "--print_command"])) == 0
        return capsys.readouterr().out

    model = make_tiny_model(tmp_path)
    command = printed("--model", model, "--max_lora_rank", "8")
    assert "--lora-target-modules down_proj gate_proj k_proj o_proj q_proj up_proj v_proj" in command
    # A low-bit checkpoint as the adapter's base: its own scheme counts.
    learner = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prepare_model(learner, "w8a8", scale_dtype=torch.float32)
    folder = str(export_checkpoint(learner, tmp_path / "low", dtype=torch.float32))
    assert '"num_bits": 8' in printed("--model", folder, "--max_lora_rank", "8")


def test_options_that_only_look_like_forbidden_ones_pass():
    allowed = ["--config-format", "hf", "--tensor-parallel-size", "2", "--kv-cache-metrics", "--seed=3", "-tp", "2"]
    argv, _ = build_server_command("m", None, vllm_args=allowed)
    assert argv[-len(allowed) :] == allowed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"transport": "nccl", "on_cpu": True}, "needs GPUs on both sides"),
        ({"transport": "mpi"}, "Choose 'file' or 'nccl'"),
        ({"vllm_args": ["--load-format", "auto"]}, "weights come from the trainer"),
        ({"vllm_args": ["--logprobs_mode=raw_logprobs"]}, "after temperature"),
        ({"vllm_args": ["--api-server-count", "4"]}, "one API process"),
        ({"vllm_args": ["--kv-cache-dtype", "fp8"]}, "does not round keys and values"),
        ({"vllm_args": ["--kv_cache_dtype=fp8"]}, "does not round keys and values"),
        ({"vllm_args": ["--speculative-config", "{}"]}, "draft model"),
        ({"vllm_args": ["--speculative_config.model", "m"]}, "draft model"),
        ({"vllm_args": ["-sc", "{}"]}, "draft model"),
        ({"vllm_args": ["--spec-model=m"]}, "draft model"),
        ({"vllm_args": ["--config", "vllm.yaml"]}, "could hold any of the options"),
        ({"vllm_args": ["--generation-config", "vllm"]}, "trainer decides how tokens are sampled"),
        ({"vllm_args": ["--override_generation_config={}"]}, "trainer decides how tokens are sampled"),
        ({"vllm_args": ["--data-parallel-size", "2"]}, "one server for each trainer"),
        ({"vllm_args": ["--data_parallel_size_local=2"]}, "one server for each trainer"),
        ({"vllm_args": ["-dp", "2"]}, "one server for each trainer"),
        ({"vllm_args": ["--pipeline_parallel_size", "2"]}, "a part of the model"),
        ({"vllm_args": ["-pp=2"]}, "a part of the model"),
        ({"vllm_args": ["--enable-lora"]}, "it follows from --max_lora_rank"),
        ({"vllm_args": ["--max-lora-rank=64"]}, "it follows from --max_lora_rank"),
        ({"vllm_args": ["--lora-dtype", "float16"]}, "dtype of the model, as in the learner"),
        ({"vllm_args": ["--lora-modules", "a=b"]}, "the adapter comes from the trainer"),
        # vLLM's parser takes the beginning of a name, and single entries of a dictionary.
        ({"vllm_args": ["--load-f", "auto"]}, "weights come from the trainer"),
        ({"vllm_args": ["--hf-overrides.rope_theta", "7"]}, "carries the scheme"),
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
        (["--exclude_modules", r".*\.0\..*_proj"], {"scheme": "w4a16", "exclude_modules": r".*\.0\..*_proj"}),
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
    monkeypatch.setattr(vllm_serve, "default_transfer_dir", lambda *arguments: directory)
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


def test_the_next_server_clears_what_a_killed_trainer_left(tmp_path, monkeypatch):
    """A trainer that is killed leaves its folder with a chunk of weights in it."""
    monkeypatch.setattr(transfer_dir, "transfer_bases", lambda: [tmp_path])
    script = f"""
        import os, signal
        from pathlib import Path
        from trl_qarl.wire.transfer_dir import owned_prefix
        folder = Path({str(tmp_path)!r}, owned_prefix() + "token")
        folder.mkdir()
        (folder / "chunk").write_bytes(b"weights")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert killed.returncode == -signal.SIGKILL and len(list(tmp_path.iterdir())) == 1
    mine = tmp_path / f"{owned_prefix()}token"
    server = child_that_sleeps(tmp_path, mine)
    server.start()
    assert sorted(tmp_path.iterdir()) == sorted([mine, tmp_path / "server.log"])
    server.stop()
    assert list(tmp_path.iterdir()) == [tmp_path / "server.log"]


def child_that_sleeps(directory, transfer_dir):
    argv = [sys.executable, "-c", "import time; time.sleep(60)", "--port", str(free_port())]
    return ServerProcess(argv, {TRANSFER_DIR_VARIABLE: str(transfer_dir)}, directory / "server.log")


HOLDS_A_QUEUE = """
    import multiprocessing, os, time
    from multiprocessing import shared_memory

    def engine(pipe):
        pipe.send((os.getpid(), shared_memory.SharedMemory(create=True, size=8).name))
        time.sleep(60)

    if __name__ == "__main__":
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        context.Process(target=engine, args=(theirs,)).start()
        print(*ours.recv(), flush=True)
        time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_what_a_killed_server_had_in_shared_memory_goes_with_its_workers(tmp_path):
    """vLLM's message queues, which the processes of an engine share."""
    (script := tmp_path / "script.py").write_text(textwrap.dedent(HOLDS_A_QUEUE))
    somebody_elses = shared_memory.SharedMemory(create=True, size=8)
    server = child_that_sleeps(tmp_path, tmp_path / "transfer")
    server.argv[1:3] = [str(script)]
    try:
        server.start()
        deadline = time.monotonic() + 60
        while len(words := server.log_file.read_text().split()) < 2:
            assert time.monotonic() < deadline and server.is_running, words
            time.sleep(0.02)
        engine, queue = int(words[0]), Path("/dev/shm", words[1])
        server._process.kill()
        server._process.wait()
        assert is_running(engine) and queue.exists()
        group = server._process.pid
        server.stop()
        assert not is_running(engine) and not queue.exists()
        assert not serve._members(group)
        assert Path("/dev/shm", somebody_elses.name).exists()
    finally:
        server.stop()
        somebody_elses.close()
        somebody_elses.unlink()


STARTS_A_SERVER = """
    import signal, sys, time
    # What a shell starts in the background ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from pathlib import Path
    from trl_qarl.rollout.server_process import ServerProcess, free_port
    {before}
    argv = [sys.executable, "-c", "import time; time.sleep(60)", "--port", str(free_port())]
    environment = {{"TRL_QARL_TRANSFER_DIR": {directory!r} + "/transfer"}}
    server = ServerProcess(argv, environment, Path({directory!r}, "server.log"))
    server.start()
    try:
        print(server._process.pid, flush=True)
        time.sleep(60)
    finally:
        print("cleaned up", flush=True)
        {cleaning}
"""


def start_and_signal(directory, signals, before="", cleaning=""):
    """What a process that has started a server prints and ends with when it gets `signals`, and the server's pid."""
    script = textwrap.dedent(STARTS_A_SERVER).format(directory=str(directory), before=before, cleaning=cleaning)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    pid = int(process.stdout.readline())
    assert (directory / "transfer").is_dir()
    for number in signals:
        process.send_signal(number)
        time.sleep(0.3)
    output, _ = process.communicate(timeout=60)
    return output, process.returncode, pid


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGTERM, signal.SIGTERM], [signal.SIGINT]])
def test_sigterm_ends_as_ctrl_c_does(tmp_path, signals):
    # `timeout` sends it to the process and then to its group.
    output, returncode, pid = start_and_signal(tmp_path, signals, cleaning="time.sleep(1); print('whole', flush=True)")
    assert output.split() == ["cleaned", "up", "whole"]
    assert returncode == 143 if signal.SIGTERM in signals else returncode != 0
    assert not is_running(pid) and not (tmp_path / "transfer").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_a_handler_of_the_users_own_stays(tmp_path):
    before = "signal.signal(signal.SIGTERM, lambda *a: (print('theirs', flush=True), sys.exit(7)))"
    output, returncode, pid = start_and_signal(tmp_path, [signal.SIGTERM], before=before)
    assert output.split() == ["theirs", "cleaned", "up"] and returncode == 7
    assert not is_running(pid) and not (tmp_path / "transfer").exists()


def test_the_handler_of_sigterm_goes_with_the_server(tmp_path):
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    server = child_that_sleeps(tmp_path, tmp_path / "transfer")
    server.start()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    server.stop()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_another_thread_installs_no_handler():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(serve.exit_on_sigterm).result()()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_free_port_is_none_that_an_outgoing_connection_may_take():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(free_port() < first for _ in range(20))
