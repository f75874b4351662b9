"""Command line and environment of a vLLM server for one learner."""

import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..wire.protocol import FILE_BACKEND, GATE, NCCL_BACKEND, TRANSFER_DIR_VARIABLE
from ..wire.transfer_dir import default_transfer_dir
from .gpu_kernels import Gpu
from .spec import EngineSpec


LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
"""Addresses that only the server's own host can reach."""

# Options of vLLM that are set here or stay at their defaults, by the reason why a user may not set them.
_REASONS = {
    "weights come from the trainer": "--load-format",
    "it carries the scheme": "--hf-overrides",
    "it follows from --scheme": "--quantization -q --quantization-config",
    "the learner compares with log-probs after temperature": "--logprobs-mode",
    "it names the engine that receives the weights": "--weight-transfer-config",
    "it carries the audit": "--worker-extension-cls",
    "a sleeping server loses its weights without the trainer knowing": "--enable-sleep-mode",
    "the gate compares paths": "--root-path",
    "the gate that refuses to generate with unpublished weights works in one API process": "--api-server-count",
    "the file could contain any of the options that are set here; give its options one by one": "--config",
    "the learner does not round keys and values, which in FP8 moves log-probs by 0.1 nats per token (docs/vllm.md)": "--kv-cache-dtype",
    "the trainer decides how tokens are sampled": "--generation-config --override-generation-config",
    "no weights are published to a draft model": "--speculative-config -sc --spec-method --spec-model --spec-tokens",
    "a stage holds a part of the model, and the audit sees whole models only": "--pipeline-parallel-size -pp",
    "a rank holds some experts, and the audit sees whole models only": "--enable-expert-parallel -ep --enable-eplb",
    "pictures must be processed as in the learner": (
        "--mm-device-do-normalize --no-mm-device-do-normalize --mm-processor-kwargs --mm-encoder-attn-dtype"
    ),
    "the audit compares the weights of each rank, so ranks may not divide pictures": "--mm-encoder-tp-mode",
    "it follows from --max_lora_rank": "--enable-lora --max-loras --max-cpu-loras --max-lora-rank --lora-target-modules",
    "an adapter has the dtype of the model, as in the learner": "--lora-dtype",
    "the adapter comes from the trainer": "--lora-modules --default-mm-loras",
    "all replicas must be behind one server, which takes the weights; use only --data-parallel-size": (
        "--data-parallel-rank -dpn --data-parallel-start-rank -dpr --data-parallel-hybrid-lb -dph "
        "--data-parallel-external-lb -dpe --data-parallel-multi-port-external-lb -dpm"
    ),
    "the trainer speaks plain HTTP; forward the port through SSH instead (docs/vllm.md)": (
        "--ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs --ssl-ciphers --enable-ssl-refresh"
    ),
    "Ray starts processes that do not know where weights arrive; vLLM's own processes need no option": (
        "--data-parallel-backend -dpb --distributed-executor-backend"
    ),
    "an engine is audited on one host; several hosts may hold replicas (docs/vllm.md)": (
        "--nnodes -n --node-rank -r --master-addr --master-port"
    ),
    "no web page may use this server": "--allowed-origins --allowed-methods --allowed-headers --allow-credentials",
    "the server may not fetch what a request names": "--allowed-media-domains --allowed-local-media-path",
}
_IMPOSED = {option: reason for reason, options in _REASONS.items() for option in options.split()}


def _reason_against(argument: str) -> str | None:
    """Return the reason why an argument of `vllm serve` is not allowed, in any spelling that vLLM's parser takes."""
    # `--name=value`, and `--name.key value` for one entry of a dictionary.
    name = argument.partition("=")[0].partition(".")[0]
    if not name.startswith("--"):
        # argparse takes a value without a space: `-qfp8`.
        return next(
            (reason for option, reason in _IMPOSED.items() if option[1] != "-" and name.startswith(option)), None
        )
    name = name.replace("_", "-")
    if name in _IMPOSED or len(name) < 4:
        return _IMPOSED.get(name)
    # argparse accepts abbreviations.
    return next((reason for option, reason in _IMPOSED.items() if option.startswith(name)), None)


def cpu_environment() -> dict[str, str]:
    """Return environment variables without which vLLM on a CPU is slow, fails or computes other values. The
    environment overrides the first two."""
    return {
        # Binding a thread to each core stalls on shared cores.
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        # Otherwise the size of the cache depends on the machine's memory, which the learner needs too.
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        # With AMX vLLM would round the activations of INT4 layers to 8 bits, contrary to `w4a16`.
        "VLLM_CPU_INT4_W4A8": "0",
        # In decoding vLLM would split sums over threads, so log-probs would depend on the number of threads.
        "VLLM_CPU_ATTN_SPLIT_KV": "0",
        # vLLM's kernels for latent attention take one size of heads (cpu_mla.py); with AMX only bfloat16, and weights
        # that are loaded once (`kv_b_proj` in mla_attention.py). Ordinary attention takes their place.
        "VLLM_MLA_DISABLE": "1",
    }


def build_server_command(
    spec: EngineSpec,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    on_cpu: bool = False,
    transport: str | None = None,
    transfer_dir: str | Path | None = None,
    gpu: Gpu | None = None,
    vllm_args: Sequence[str] = (),
) -> tuple[list[str], dict[str, str]]:
    """
    Return argv of vLLM's own OpenAI server for the learner of `spec`, and the variables to add to the environment.

    `transport` is `"file"` or `"nccl"`; it defaults to `"file"` on a CPU, and if only this host can reach the server,
    otherwise to `"nccl"`. `transfer_dir` is the directory for files, by default [`default_transfer_dir`]; `vllm_args`
    are further arguments of `vllm serve`. `ValueError` is raised for NCCL on a CPU, an argument that is set here, or a
    scheme that cannot run here.
    """
    arguments = spec.arguments(on_cpu, gpu)
    transport = transport or ("file" if on_cpu or host in LOCAL_HOSTS else "nccl")
    if transport == "nccl" and on_cpu:
        raise ValueError("transport='nccl' needs GPUs on both sides. Use transport='file'.")
    if problem := next(problems_of_options(vllm_args), None):
        raise ValueError(problem)
    arguments |= {
        "host": host,
        "port": port,
        # Allows log-probs of a whole prompt.
        "max_logprobs": -1,
        "weight_transfer_config": {"backend": FILE_BACKEND if transport == "file" else NCCL_BACKEND},
        "middleware": GATE,
        # vLLM's default lets every page read answers.
        "allowed_origins": "[]",
        # By default vLLM fetches any address that a prompt names. An empty list would allow all.
        "allowed_media_domains": ["nothing.invalid"],
    }
    if spec.pictures:
        # Adds the path for token ids with pictures.
        arguments["enable_scale_out"] = True
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    if transport == "file":
        environment[TRANSFER_DIR_VARIABLE] = str(transfer_dir or default_transfer_dir(port))
    if on_cpu:
        environment |= cpu_environment()
    elif spec.numerics == "engine":
        from ..bitwise import cuda

        environment |= cuda.ENVIRONMENT
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in arguments.items():
        argv += _as_option(name.replace("_", "-"), value)
    return [*argv, *vllm_args], environment


def problems_of_options(vllm_args: Sequence[str]) -> Iterator[str]:
    """Yield a problem for each argument of `vllm serve` that is set here."""
    for argument in vllm_args:
        if argument.startswith("-") and (reason := _reason_against(argument)):
            yield f"{argument.partition('=')[0]} is set by trl-qarl: {reason}. Remove it."


def tensor_parallel_size(vllm_args: Sequence[str]) -> int:
    """Return the number of ranks of each replica in arguments of `vllm serve`. `ValueError` is raised for none."""
    size = _value_of(vllm_args, "--tensor-parallel-size", "-tp", type=int, default=1)
    if size < 1:
        raise ValueError(f"--tensor-parallel-size={size} must be at least 1.")
    return size


def context_length(vllm_args: Sequence[str]) -> int | None:
    """Return the context in arguments of `vllm serve`, `None` if it is not given, or not as a plain number."""
    value = _value_of(vllm_args, "--max-model-len", default="")
    return int(value) if value.isdecimal() else None


def _value_of(vllm_args: Sequence[str], *names: str, **how: Any) -> Any:
    parser = ArgumentParser(add_help=False)
    parser.add_argument(*names, dest="value", **how)
    args = [argument.replace("_", "-") if argument.startswith("--") else argument for argument in vllm_args]
    return parser.parse_known_args(args)[0].value


def _as_option(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, Mapping):
        return [f"--{name}", json.dumps(value)]
    return [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
