"""
How a vLLM server for one learner is started: a pure function from settings to command line and environment, and the child
process of `vllm_server_autostart=True`.
"""

import atexit
import ctypes
import itertools
import json
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..quantization.schemes import scheme_of_group
from ..wire.handshake import TOKEN_VARIABLE, make_token
from ..wire.protocol import FILE_BACKEND, GATE, NCCL_BACKEND, TRANSFER_DIR_VARIABLE, WORKER_EXTENSION
from ..wire.transfer_dir import default_transfer_dir, make_transfer_dir, remove_leftover_dirs


__all__ = [
    "ServerProcess",
    "build_server_command",
    "check_engine_runs",
    "cpu_environment",
    "exit_on_sigterm",
    "free_port",
]

logger = logging.getLogger(__name__)

_TRACKER_SECONDS = 5.0

_NO_DRAFT = "no weights are published to a draft model"
_LORA = "it follows from --max_lora_rank"
_ONE_REPLICA = "weights are published to one replica; start one server for each trainer"

# vLLM options that are set here or left at their defaults, with the reason why nobody else may set them.
_IMPOSED = {
    "--load-format": "weights come from the trainer",
    "--hf-overrides": "it carries the scheme",
    "--quantization": "it follows from --scheme",
    "-q": "it follows from --scheme",
    "--logprobs-mode": "the learner compares with log-probs after temperature",
    "--weight-transfer-config": "it names the engine that receives the weights",
    "--worker-extension-cls": "it carries the audit",
    "--enable-sleep-mode": "a server that sleeps forgets its weights without the trainer knowing",
    "--root-path": "the gate looks at paths",
    "--api-server-count": "the gate that refuses to generate with unpublished weights lives in one API process",
    "--config": "the file could hold any of the options that are set here; give its options one by one",
    "--quantization-config": "it follows from --scheme",
    "--kv-cache-dtype": "the learner does not round keys and values",
    "--generation-config": "the trainer decides how tokens are sampled",
    "--override-generation-config": "the trainer decides how tokens are sampled",
    "--speculative-config": _NO_DRAFT,
    "-sc": _NO_DRAFT,
    "--spec-method": _NO_DRAFT,
    "--spec-model": _NO_DRAFT,
    "--spec-tokens": _NO_DRAFT,
    "--pipeline-parallel-size": "a stage holds a part of the model, and the audit sees whole models only",
    "-pp": "a stage holds a part of the model, and the audit sees whole models only",
    "--enable-lora": _LORA,
    "--max-loras": _LORA,
    "--max-cpu-loras": _LORA,
    "--max-lora-rank": _LORA,
    "--lora-target-modules": _LORA,
    "--lora-dtype": "an adapter has the dtype of the model, as in the learner",
    "--lora-modules": "the adapter comes from the trainer",
    "--default-mm-loras": "the adapter comes from the trainer",
    "--data-parallel-size": _ONE_REPLICA,
    "-dp": _ONE_REPLICA,
    "--data-parallel-size-local": _ONE_REPLICA,
    "-dpl": _ONE_REPLICA,
    "--data-parallel-rank": _ONE_REPLICA,
    "-dpn": _ONE_REPLICA,
    "--data-parallel-start-rank": _ONE_REPLICA,
    "-dpr": _ONE_REPLICA,
    "--data-parallel-hybrid-lb": _ONE_REPLICA,
    "-dph": _ONE_REPLICA,
    "--data-parallel-external-lb": _ONE_REPLICA,
    "-dpe": _ONE_REPLICA,
    "--data-parallel-multi-port-external-lb": _ONE_REPLICA,
    "-dpm": _ONE_REPLICA,
}


def _reason_against(argument: str) -> str | None:
    """Why an argument of `vllm serve` is not allowed, in any spelling that vLLM's parser understands."""
    # `--name=value`, and `--name.key value` for one entry of a dictionary.
    name = argument.partition("=")[0].partition(".")[0]
    if not name.startswith("--"):
        return _IMPOSED.get(name)
    name = name.replace("_", "-")
    if name in _IMPOSED or len(name) < 4:
        return _IMPOSED.get(name)
    # argparse takes the beginning of a name for the whole.
    return next((reason for option, reason in _IMPOSED.items() if option.startswith(name)), None)


def cpu_environment() -> dict[str, str]:
    """
    Settings without which vLLM on a CPU is slow, fails or computes something else.

    Two are defaults, what is in the environment already wins. `nobind`: binding a thread to each core stalls where cores are
    shared. The key-value cache is otherwise sized by the machine's memory, which the learner needs too.

    Two are imposed: with AMX vLLM would round the activations of INT4 layers to 8 bits, which `w4a16` says they are not; and
    in decoding it would split the sums of attention over threads, so that log-probs depend on how many there are.
    """
    defaults = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return {name: os.environ.get(name, value) for name, value in defaults.items()} | {
        "VLLM_CPU_INT4_W4A8": "0",
        "VLLM_CPU_ATTN_SPLIT_KV": "0",
    }


def check_engine_runs(quantization_config: Mapping[str, Any] | None, dtype: str, on_cpu: bool) -> None:
    """
    Raise for a scheme that vLLM cannot run here, before it is started.

    Args:
        quantization_config (`Mapping` or `None`):
            From [`~trl_qarl.checkpoint.layout.quantization_config`].
        dtype (`str`):
            Dtype of everything that is not quantized.
        on_cpu (`bool`):
            Whether the engine runs on a CPU.

    Raises:
        ValueError: for `w4a8` on a CPU or in another dtype than bfloat16.
    """
    schemes = itertools.starmap(scheme_of_group, (quantization_config or {}).get("config_groups", {}).items())
    if not any(scheme is not None and scheme.has_fp8_scales for scheme in schemes):
        return
    if on_cpu:
        raise ValueError(
            "scheme='w4a8' cannot roll out in vLLM on a CPU: its kernel there is another arithmetic (INT8 activations), and wrong "
            "after its weights are reloaded. Use 'w4a16' or 'w8a8', `use_vllm=False`, or a GPU of compute capability 9.0."
        )
    if dtype != "bfloat16":
        raise ValueError(
            f"scheme='w4a8' runs in vLLM in bfloat16 only, not in {dtype}. Set `bf16=True` (`--dtype bfloat16`)."
        )


def build_server_command(
    model: str,
    quantization_config: Mapping[str, Any] | None,
    *,
    dtype: str = "bfloat16",
    host: str = "127.0.0.1",
    port: int = 8000,
    on_cpu: bool = False,
    transport: str | None = None,
    transfer_dir: str | Path | None = None,
    max_lora_rank: int | None = None,
    lora_modules: Sequence[str] = (),
    numerics: str = "fast",
    vllm_args: Sequence[str] = (),
) -> tuple[list[str], dict[str, str]]:
    """
    Command line and environment of vLLM's own OpenAI server, ready for a trainer.

    Args:
        model (`str`):
            Hub id or directory of the model; its configuration and tokenizer are read, its weights are not.
        quantization_config (`Mapping` or `None`):
            From [`~trl_qarl.checkpoint.layout.quantization_config`]; `None` for an unquantized engine.
        dtype (`str`, *optional*, defaults to `"bfloat16"`):
            Dtype of everything that is not quantized; the learner's.
        host (`str`, *optional*, defaults to `"127.0.0.1"`):
            Address to listen on.
        port (`int`, *optional*, defaults to `8000`):
            Port to listen on.
        on_cpu (`bool`, *optional*, defaults to `False`):
            Whether the engine runs on a CPU.
        transport (`str`, *optional*):
            `"file"` or `"nccl"`. Defaults to `"file"` on a CPU, to `"nccl"` else.
        transfer_dir (`str` or `Path`, *optional*):
            Directory for `transport="file"`. Defaults to [`default_transfer_dir`].
        max_lora_rank (`int`, *optional*):
            Largest rank of the trainer's LoRA adapter, one of [`~trl_qarl.checkpoint.serving.ENGINE_RANKS`]; none without.
        lora_modules (`Sequence[str]`, *optional*):
            Last components of the names of the layers that may have an adapter.
        numerics (`str`, *optional*, defaults to `"fast"`):
            The learner's. On a GPU `"engine"` gives a slower engine, whose arithmetic the learner can repeat
            ([`trl_qarl.numerics.cuda`]); on a CPU every engine is one.
        vllm_args (`Sequence[str]`, *optional*):
            Further arguments of `vllm serve`.

    Returns:
        argv, and the variables to add to the environment.

    Raises:
        ValueError: for an unknown transport, NCCL on a CPU, an argument that is set here, or a scheme that cannot run here.
    """
    check_engine_runs(quantization_config, dtype, on_cpu)
    transport = transport or ("file" if on_cpu else "nccl")
    if transport not in ("file", "nccl"):
        raise ValueError(f"transport={transport!r} is unknown. Choose 'file' or 'nccl'.")
    if transport == "nccl" and on_cpu:
        raise ValueError("transport='nccl' needs GPUs on both sides. Use transport='file'.")
    for argument in vllm_args:
        if argument.startswith("-") and (reason := _reason_against(argument)):
            raise ValueError(f"{argument.partition('=')[0]} is set by trl-qarl: {reason}. Remove it.")
    backend = FILE_BACKEND if transport == "file" else NCCL_BACKEND
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", model, "--host", host, "--port", str(port), "--dtype", dtype]
    argv += ["--load-format", "dummy"]
    if quantization_config:
        argv += ["--hf-overrides", json.dumps({"quantization_config": quantization_config})]
    # -1: a deep audit asks for the log-probs of a whole prompt.
    argv += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    argv += ["--weight-transfer-config", json.dumps({"backend": backend})]
    argv += ["--worker-extension-cls", WORKER_EXTENSION, "--middleware", GATE]
    if max_lora_rank is not None:
        argv += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(max_lora_rank)]
        argv += ["--lora-target-modules", *lora_modules]
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    if transport == "file":
        environment[TRANSFER_DIR_VARIABLE] = str(transfer_dir or default_transfer_dir(port))
    if on_cpu:
        # Compiling takes minutes there, and the compiled graph would not see the learner's kernels.
        argv += ["--enforce-eager"]
        environment |= cpu_environment()
    elif numerics == "engine":
        from ..numerics import cuda

        environment |= cuda.ENVIRONMENT
        for name, value in cuda.ENGINE_ARGUMENTS.items():
            argv += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return [*argv, *vllm_args], environment


def free_port() -> int:
    """
    A port on the loopback address that nothing listens on, below those that Linux gives to outgoing connections: one of them
    could otherwise take it before a server does.
    """
    for port in random.SystemRandom().sample(range(15000, 32768), 100):
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise OSError("None of 100 ports between 15000 and 32768 is free on 127.0.0.1.")


class ServerProcess:
    """
    A server as a child of the trainer. It ends with [`~ServerProcess.stop`], with the interpreter, and on Linux also when the
    trainer is killed.

    Args:
        argv (`Sequence[str]`), environment (`Mapping[str, str]`):
            From [`build_server_command`].
        log_file (`Path`):
            Where the server's output goes.

    Attributes:
        token (`str`):
            The secret that the server asks its trainer for.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], log_file: Path):
        self.argv = list(argv)
        self.token = make_token()
        self.environment = dict(environment)
        self.log_file = log_file
        self._process: subprocess.Popen | None = None
        self._restore_sigterm: Callable[[], None] | None = None
        atexit.register(self.stop)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server unless it runs; what is left of one that was killed is cleared away first."""
        if self.is_running:
            return
        self.stop()
        _check_port_is_free(int(self.argv[self.argv.index("--port") + 1]))
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        if directory := self.environment.get(TRANSFER_DIR_VARIABLE):
            remove_leftover_dirs()
            make_transfer_dir(directory)
        self._restore_sigterm = exit_on_sigterm()
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self.argv,
                env={**os.environ, **self.environment, TOKEN_VARIABLE: self.token},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent(),
            )

    def wait(self, url: str, timeout: float) -> None:
        """
        Wait until the server answers, saying so on the terminal.

        Raises:
            RuntimeError: if it ends or does not answer in time, with the end of its log.
        """
        import requests

        from .client import LocalSession

        session = LocalSession()
        assert self._process is not None
        print(f"Starting a vLLM server; its log is {self.log_file}", flush=True)
        start = time.monotonic()
        while True:
            waited = time.monotonic() - start
            try:
                if session.get(f"{url}/health", timeout=5).status_code == 200:
                    print(f"\rvLLM server ready after {waited:.0f} s          ", flush=True)
                    return
            except requests.RequestException:
                pass
            if not self.is_running or waited > timeout:
                state = f"ended with code {self._process.returncode}" if not self.is_running else "did not answer"
                self.stop()
                tail = self.log_file.read_text(errors="replace")[-3000:]
                raise RuntimeError(
                    f"The vLLM server {state} after {waited:.0f} s. The end of {self.log_file}:\n{tail}"
                )
            if sys.stdout.isatty():
                print(f"\rStarting a vLLM server ... {waited:.0f} s", end="", flush=True)
            time.sleep(1.0)

    def stop(self) -> None:
        """End the server and its workers, which are all of one process group."""
        if self._process is None:
            return
        if self.is_running:
            self._process.terminate()
            try:
                self._process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                logger.warning("The vLLM server did not end when asked to; ending it the hard way.")
        # Workers outlive a server that was killed.
        _end_group(self._process.pid)
        self._process.wait()
        self._process = None
        if directory := self.environment.get(TRANSFER_DIR_VARIABLE):
            shutil.rmtree(directory, ignore_errors=True)
        if self._restore_sigterm is not None:
            self._restore_sigterm()


def exit_on_sigterm() -> Callable[[], None]:
    """
    Have SIGTERM end this process as Ctrl-C does, through every `finally`, with exit code 143; returns what undoes it.

    A handler that somebody else has installed stays, and so does everything where this is not the main thread.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return lambda: None

    def leave(signum, frame):
        # `timeout` and others send it twice, and the second one must not interrupt the cleaning up after the first.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + signum)

    def restore():
        is_ours = signal.getsignal(signal.SIGTERM) in (leave, signal.SIG_IGN)
        if is_ours and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, leave)
    return restore


def _end_group(group: int) -> None:
    """
    Kill a process group. Python's resource trackers in it end by themselves when the others have, and first remove what those
    left in shared memory: vLLM's message queues, of some hundred MiB.
    """
    deadline = time.monotonic() + _TRACKER_SECONDS
    while (members := _members(group)) and time.monotonic() < deadline:
        for pid, command in members.items():
            if b"multiprocessing.resource_tracker" not in command:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _members(group: int) -> dict[int, bytes]:
    """Processes of a group that have not ended, and their command lines; none without `/proc`."""
    members = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, its_group, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(its_group) == group and state not in "ZX":
                members[int(entry.name)] = (entry / "cmdline").read_bytes()
    return members


def _check_port_is_free(port: int) -> None:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError as error:
            raise ValueError(
                f"vllm_server_autostart=True cannot start a server on port {port}: {error.strerror}. Choose another "
                "`vllm_server_port`."
            ) from error


def _end_with_parent():
    """Function for the child to call: have Linux end it when the thread that started it is gone, however that happens."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    set_parent_death_signal = 1
    return lambda: prctl(set_parent_death_signal, signal.SIGTERM)
