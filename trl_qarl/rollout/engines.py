"""vLLM engines and servers for a prepared learner."""

import gc
import json
import os
import secrets
import shlex
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from ..adapters.engine import lora_arguments
from ..checkpoint.export import is_export
from ..checkpoint.layout import quantization_config
from ..numerics import cuda
from ..numerics.attach import has_engine_numerics
from ..quantization.inventory import Inventory
from ..wire.protocol import FILE_BACKEND, WORKER_EXTENSION
from ..wire.transfer_dir import default_transfer_dir, owned_prefix
from .gpu_kernels import kernel_arguments
from .pictures import engine_arguments
from .publisher import largest_chunk
from .server_command import build_server_command, check_engine_runs, cpu_environment
from .server_process import ServerProcess


__all__ = ["load_engine", "make_engine", "server_process", "share_engine", "start_command"]


def load_engine(export_dir: str | Path, **vllm_arguments):
    """
    An export as it is deployed: a vLLM engine in this process, with the dtype, kernels and log-probs (those after
    temperature) of the engine that made the rollouts.

    vLLM's engines of one process share its process groups, which the first one to end takes with it: `del` one before
    the next is loaded.

    Args:
        export_dir (`str` or `Path`):
            Folder written by [`export_checkpoint`] with its tokenizer, or by `trl-qarl export`.
        vllm_arguments:
            Further arguments of `vllm.LLM`, such as `max_model_len` or `gpu_memory_utilization`.

    Returns:
        The `vllm.LLM`.

    Raises:
        ValueError: for a folder that holds no export, or a scheme that vLLM cannot run here.

    Example:

    ```python
    >>> engine = load_engine("outputs/quickstart/w4a16", max_model_len=128)
    >>> engine.generate("23 + 8 =")[0].outputs[0].text
    ```
    """
    folder = Path(export_dir)
    if not is_export(folder):
        raise ValueError(
            f"{str(export_dir)!r} holds no export of trl_qarl. Masters, and checkpoints of a training, become one with "
            "`trl-qarl export` or `export_checkpoint`."
        )
    config = json.loads((folder / "config.json").read_text())
    on_cpu = not torch.cuda.is_available()
    check_engine_runs(config.get("quantization_config"), config["dtype"], on_cpu)
    # Left to itself vLLM would run a float32 export in 16 bits.
    arguments = {} if on_cpu else kernel_arguments(config.get("quantization_config"))
    arguments |= {"model": str(folder), "dtype": config["dtype"], **vllm_arguments}
    return _in_process_engine(on_cpu=on_cpu, **arguments)


def make_engine(model, dtype: torch.dtype, *, on_cpu: bool, **arguments):
    """
    A vLLM engine in this process that waits for the weights of `model`, a learner prepared by [`prepare_model`]. On a
    GPU it is one whose arithmetic the learner repeats if `model` has engine numerics already; on a CPU every engine
    is.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The learner; the engine reads configuration and tokenizer from `model.name_or_path`.
        dtype (`torch.dtype`):
            Dtype of everything that is not quantized.
        on_cpu (`bool`):
            Whether the engine runs on a CPU.
        arguments:
            Further arguments of `vllm.LLM`.
    """
    config = quantization_config(Inventory.of(model)) or None
    check_engine_runs(config, str(dtype).removeprefix("torch."), on_cpu)
    if _is_repeated_on_gpu(model):
        cuda.prepare_process()
        arguments |= cuda.ENGINE_ARGUMENTS
    return _in_process_engine(
        on_cpu=on_cpu,
        model=model.name_or_path,
        load_format="dummy",
        hf_overrides={"quantization_config": config} if config else None,
        dtype=dtype,
        **({} if on_cpu else kernel_arguments(config)),
        **lora_arguments(model),
        **engine_arguments(model),
        **arguments,
    )


def share_engine(accelerator: Accelerator, size: int) -> tuple[dict[str, Any], dist.ProcessGroup | None]:
    """
    Let processes that share an engine, `size` of them each, find each other. Every process must call it.

    Returns:
        Arguments of [`make_engine`], and the processes with which this one shares its engine, `None` where it has one
        of its own.

    Raises:
        ValueError: if `size` does not divide the number of processes.
    """
    from trl.trainer.utils import ensure_master_addr_port

    count = accelerator.num_processes
    if count % size != 0:
        raise ValueError(f"vllm_tensor_parallel_size={size} must divide the number of processes, {count}.")
    group = None
    if size > 1:
        ranks = [list(range(start, start + size)) for start in range(0, count, size)]
        group, _ = dist.new_subgroups_by_enumeration(ranks)
    if count > 1:
        # vLLM's launcher reads these. With one process they are left out, as other libraries would take them for a
        # launcher's.
        os.environ["RANK"] = str(accelerator.process_index)
        os.environ["LOCAL_RANK"] = str(accelerator.local_process_index)
        os.environ["WORLD_SIZE"] = str(count)
        ensure_master_addr_port()
    arguments = {
        "tensor_parallel_size": size,
        "distributed_executor_backend": "uni" if count == 1 else "external_launcher",
        # The processes of one engine must draw the same samples.
        "seed": accelerator.process_index // size,
    }
    return arguments, group


def _in_process_engine(*, on_cpu: bool, **arguments):
    """
    `vllm.LLM(**arguments)` whose worker lives in this process, with the kernels of rollouts, and log-probs that are
    those after temperature.
    """
    # Read when vLLM starts an engine: a worker in another process could not be handed tensors.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if on_cpu:
        os.environ.update(cpu_environment())
    from vllm import LLM
    from vllm.distributed import parallel_state

    # A garbage-collected engine destroys the process group that the next engine shares.
    # vLLM exempts all objects that are there when an engine starts from collection: a trainer and its earlier engine,
    # too.
    gc.unfreeze()
    gc.collect()
    # vLLM keeps the groups of an earlier dense engine and adds no group of experts for a mixture.
    if parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
        parallel_state.destroy_model_parallel()
    defaults = {
        "logprobs_mode": "processed_logprobs",
        # On a CPU compiling takes minutes, and the compiled graph would not see the learner's kernels.
        "enforce_eager": on_cpu,
        # The transfer backend also selects our kernels, without a weight sync too.
        "weight_transfer_config": {"backend": FILE_BACKEND},
        "worker_extension_cls": WORKER_EXTENSION,
    }
    return LLM(**(defaults | arguments))


def _is_repeated_on_gpu(model) -> bool:
    return model.device.type == "cuda" and has_engine_numerics(model)


def start_command(args, model, dtype: torch.dtype) -> str:
    """Return the command with which a user starts a server for a prepared `model` and a [`QaRLConfig`]."""
    options = {
        "model": model.name_or_path,
        "scheme": args.scheme if isinstance(args.scheme, str) else json.dumps(args.plan.written),
        "group_size": args.group_size if isinstance(args.scheme, str) else None,
        "exclude_modules": args.exclude_modules,
        **args.plan.options,
        "dtype": str(dtype).removeprefix("torch."),
        "max_lora_rank": lora_arguments(model).get("max_lora_rank"),
        "numerics": "engine" if _is_repeated_on_gpu(model) else None,
        "cpu_weights": None if args.cpu_weights == "expanded" else args.cpu_weights,
        "port": None if args.vllm_server_base_url else args.vllm_server_port,
    }
    argv = ["trl-qarl", "vllm-serve"]
    for name, value in options.items():
        if value:
            argv += [f"--{name}", *(map(str, value) if isinstance(value, list | tuple) else [str(value)])]
    return shlex.join(argv)


def server_process(args, model, dtype: torch.dtype) -> ServerProcess:
    """Return the server of `vllm_server_autostart=True`, not yet started, for a prepared `model` and a
    [`QaRLConfig`]."""
    vllm_args = []
    if args.vllm_max_model_length is not None:
        vllm_args += ["--max-model-len", str(args.vllm_max_model_length)]
    on_cpu = args.use_cpu or not torch.cuda.is_available()
    vllm_args += ["--model-impl", args.vllm_model_impl]
    if not on_cpu:
        vllm_args += ["--gpu-memory-utilization", str(args.vllm_gpu_memory_utilization)]
        vllm_args += ["--tensor-parallel-size", str(args.vllm_tensor_parallel_size)]
    if args.trust_remote_code:
        vllm_args.append("--trust-remote-code")
    lora = lora_arguments(model)
    argv, environment = build_server_command(
        model.name_or_path,
        quantization_config(Inventory.of(model)) or None,
        dtype=str(dtype).removeprefix("torch."),
        port=args.vllm_server_port,
        on_cpu=on_cpu,
        # NCCL refuses two processes on one GPU, which is what a child without settings of its own gets.
        transport="file",
        # The next trainer tells from the name whether this one was killed.
        transfer_dir=default_transfer_dir(args.vllm_server_port, largest_chunk(model, dtype)).with_name(
            f"{owned_prefix()}{secrets.token_hex(8)}"
        ),
        max_lora_rank=lora.get("max_lora_rank"),
        lora_modules=lora.get("lora_target_modules", ()),
        numerics="engine" if _is_repeated_on_gpu(model) else "fast",
        takes_pictures=bool(engine_arguments(model)),
        vllm_args=vllm_args,
    )
    return ServerProcess(argv, environment, Path(args.output_dir) / "vllm_server.log")
