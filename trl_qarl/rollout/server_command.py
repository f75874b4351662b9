"""Command line and environment of a vLLM server for one learner, as a pure function of its settings."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..wire.protocol import FILE_BACKEND, GATE, NCCL_BACKEND, TRANSFER_DIR_VARIABLE, WORKER_EXTENSION
from ..wire.transfer_dir import default_transfer_dir
from .gpu_kernels import Gpu, kernel_arguments


__all__ = ["LOCAL_HOSTS", "build_server_command", "cpu_environment"]

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
"""Addresses at which only the server's own host reaches it."""

# Options of vLLM that are set here or left at their defaults, by the reason why a user may not set them.
_REASONS = {
    "weights come from the trainer": "--load-format",
    "it carries the scheme": "--hf-overrides",
    "it follows from --scheme": "--quantization -q --quantization-config",
    "the learner compares with log-probs after temperature": "--logprobs-mode",
    "it names the engine that receives the weights": "--weight-transfer-config",
    "it carries the audit": "--worker-extension-cls",
    "a server that sleeps forgets its weights without the trainer knowing": "--enable-sleep-mode",
    "the gate looks at paths": "--root-path",
    "the gate that refuses to generate with unpublished weights lives in one API process": "--api-server-count",
    "the file could hold any of the options that are set here; give its options one by one": "--config",
    "the learner does not round keys and values, which in FP8 moves log-probs by 0.1 nats per token (docs/vllm.md)": "--kv-cache-dtype",
    "the trainer decides how tokens are sampled": "--generation-config --override-generation-config",
    "no weights are published to a draft model": "--speculative-config -sc --spec-method --spec-model --spec-tokens",
    "a stage holds a part of the model, and the audit sees whole models only": "--pipeline-parallel-size -pp",
    "a rank holds some experts, and the audit sees whole models only": "--enable-expert-parallel -ep --enable-eplb",
    "a picture must become what it is in the learner": (
        "--mm-device-do-normalize --no-mm-device-do-normalize --mm-processor-kwargs --mm-encoder-attn-dtype"
    ),
    "the audit compares the weights of each rank, so ranks do not share pictures out": "--mm-encoder-tp-mode",
    "it follows from --max_lora_rank": "--enable-lora --max-loras --max-cpu-loras --max-lora-rank --lora-target-modules",
    "an adapter has the dtype of the model, as in the learner": "--lora-dtype",
    "the adapter comes from the trainer": "--lora-modules --default-mm-loras",
    "all replicas must be behind one server, which takes the weights; use only --data-parallel-size": (
        "--data-parallel-rank -dpn --data-parallel-start-rank -dpr --data-parallel-hybrid-lb -dph "
        "--data-parallel-external-lb -dpe --data-parallel-multi-port-external-lb -dpm"
    ),
    "Ray starts processes that do not know where weights arrive": "--data-parallel-backend -dpb",
}
_IMPOSED = {option: reason for reason, options in _REASONS.items() for option in options.split()}


def _reason_against(argument: str) -> str | None:
    """Return why an argument of `vllm serve` is not allowed, in any spelling that vLLM's parser understands."""
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

    Two are defaults, what is in the environment already wins. `nobind`: binding a thread to each core stalls where
    cores are shared. The key-value cache is otherwise sized by the machine's memory, which the learner needs too.

    Two are imposed: with AMX vLLM would round the activations of INT4 layers to 8 bits, which `w4a16` says they are
    not; and in decoding it would split the sums of attention over threads, so that log-probs depend on how many there
    are.
    """
    defaults = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return {name: os.environ.get(name, value) for name, value in defaults.items()} | {
        "VLLM_CPU_INT4_W4A8": "0",
        "VLLM_CPU_ATTN_SPLIT_KV": "0",
    }


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
    gpu: Gpu | None = None,
    takes_pictures: bool = False,
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
            `"file"` or `"nccl"`. Defaults to `"file"` on a CPU, and where only this host can reach the server; to
            `"nccl"` else.
        transfer_dir (`str` or `Path`, *optional*):
            Directory for `transport="file"`. Defaults to [`default_transfer_dir`].
        max_lora_rank (`int`, *optional*):
            Largest rank of the trainer's LoRA adapter, one of [`~trl_qarl.checkpoint.serving.ENGINE_RANKS`]; none
            without.
        lora_modules (`Sequence[str]`, *optional*):
            Last components of the names of the layers that may have an adapter.
        numerics (`str`, *optional*, defaults to `"fast"`):
            The learner's. On a GPU `"engine"` gives a slower engine, whose arithmetic the learner can repeat
            ([`trl_qarl.numerics.cuda`]); on a CPU every engine is one.
        gpu ([`Gpu`], *optional*):
            The GPU that the engine runs on. Defaults to the one that is here.
        takes_pictures (`bool`, *optional*, defaults to `False`):
            Whether the model is one of pictures and text.
        vllm_args (`Sequence[str]`, *optional*):
            Further arguments of `vllm serve`.

    Returns:
        argv, and the variables to add to the environment.

    Raises:
        ValueError: for an unknown transport, NCCL on a CPU, an argument that is set here, or a scheme that cannot run
            here.
    """
    kernels = kernel_arguments(quantization_config, dtype, on_cpu, gpu)
    transport = transport or ("file" if on_cpu or host in LOCAL_HOSTS else "nccl")
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
    if takes_pictures:
        # Pictures come with token ids, and the processor normalizes them as the learner's does.
        argv += [
            "--enable-scale-out",
            "--no-mm-device-do-normalize",
            "--limit-mm-per-prompt",
            json.dumps({"video": 0}),
        ]
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    if transport == "file":
        environment[TRANSFER_DIR_VARIABLE] = str(transfer_dir or default_transfer_dir(port))
    if on_cpu:
        # Compiling takes minutes there, and the compiled graph would not see the learner's kernels.
        argv += ["--enforce-eager"]
        environment |= cpu_environment()
    else:
        for name, value in kernels.items():
            argv += [f"--{name.replace('_', '-')}", json.dumps(value)]
        if numerics == "engine":
            from ..numerics import cuda

            environment |= cuda.ENVIRONMENT
            for name, value in cuda.ENGINE_ARGUMENTS.items():
                argv += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return [*argv, *vllm_args], environment
