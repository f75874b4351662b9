"""Checks settings from `accelerate launch` that are not in the training arguments: sharding by FSDP2 or DeepSpeed,
parallelism, compilation."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator, ParallelismConfig
from accelerate.commands.config import default_config_file, load_config_from_file
from accelerate.utils import (
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    TorchDynamoPlugin,
    gather_object,
    patch_environment,
)
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, StateDictType
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from transformers import Trainer

from ..checkpoint.load import SHARDS_FOLDER
from ..options import MUONS, optimizer_name
from ..quantization.names import base_model, is_peft_model
from ..sharding.zero3 import keep_float32_masters
from .problems import raise_problems
from .refused import REFUSED


logger = logging.getLogger(__name__)

_WITHOUT_SHARDS = {
    "bitsandbytes": "its kernels take no sharded parameters. Use 'adamw_torch_8bit' or 'adamw_torch_4bit', which are torchao's",
    "Adafactor": "its factored moments mix sharded and whole tensors. Use 'adamw_torch_fused' or 'adamw_torch_8bit'",
    **dict.fromkeys(("GaLore", "APOLLO"), "it projects gradients of whole matrices. Use 'adamw_torch_8bit'"),
}
"""Optimizers that fail on FSDP2's parameters, by package or kind, with reasons and alternatives."""

_ROUNDED = (
    "it rounds the model's weights to 16 bits, and low-bit weights would be made from rounded masters. Remove it: with bf16=True "
    "the forward computes in bfloat16 anyway"
)
_PRECISION_VARIABLE = "ACCELERATE_MIXED_PRECISION"
_PROCESSES_VARIABLE = "TRL_QARL_NUM_PROCESSES"
_OTHER_LAUNCHES = "it is untested. Remove it, or launch with FSDP2 or DDP"

_DEEPSPEED_STATES = "global_step*/*zero_pp_rank_*_optim_states.pt"
_LAUNCHES_BY_FILES = {
    "global_step*/*zero_pp_rank_*_model_states.pt": "ZeRO-3",
    _DEEPSPEED_STATES: "ZeRO-1 or 2",
    "optimizer.bin": "FSDP2 and FULL_STATE_DICT",
    "optimizer_0": "FSDP2 and SHARDED_STATE_DICT",
    "optimizer.pt": "one process or DDP",
}
"""Launches by a file that only they write into a checkpoint; the first match counts."""


@dataclass(frozen=True)
class Launch:
    """Settings of `accelerate launch`: plugins of FSDP and DeepSpeed, parallelism, and the backend of compilation."""

    fsdp: Any = None
    deepspeed: Any = None
    parallelism: Any = None
    dynamo: DynamoBackend = DynamoBackend.NO

    @classmethod
    def of_arguments(cls, args: Any) -> "Launch":
        """Return the settings as variables of the environment and `args` have them, before there is an accelerator."""
        fsdp = _fsdp_plugin() if _asks_for("FSDP") else None
        parallelism = args.parallelism_config
        if parallelism is None and _asks_for("PARALLELISM_CONFIG"):
            parallelism = ParallelismConfig()
        return cls(fsdp, args.deepspeed_plugin, parallelism, TorchDynamoPlugin().backend)

    @classmethod
    def of(cls, accelerator: Accelerator) -> "Launch":
        """Return the settings as accelerate has completed them."""
        state = accelerator.state
        plugins = getattr(state, "fsdp_plugin", None), getattr(state, "deepspeed_plugin", None)
        return cls(*plugins, accelerator.parallelism_config, state.dynamo_plugin.backend)

    @property
    def name(self) -> str:
        """The name in [`_LAUNCHES_BY_FILES`]."""
        if self.fsdp is not None:
            return f"FSDP2 and {self.fsdp.state_dict_type.name}"
        if self.deepspeed is not None:
            return "ZeRO-3" if self.deepspeed.zero_stage == 3 else "ZeRO-1 or 2"
        return "one process or DDP"


def _fsdp_plugin() -> FullyShardedDataParallelPlugin:
    if os.environ.get("FSDP_VERSION") == "2":
        return FullyShardedDataParallelPlugin()
    # FSDP1, which is refused, without what needs a GPU: one process that sends its weights to the others.
    with patch_environment(FSDP_CPU_RAM_EFFICIENT_LOADING="false"):
        return FullyShardedDataParallelPlugin(sync_module_states=False, cpu_ram_efficient_loading=False)


def _asks_for(backend: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{backend}", "false").lower() == "true"


def problems_of_launch(launch: Launch, args: Any, has_adapter: bool, is_in_4bit: bool) -> Iterator[str]:
    """Yield problems of the settings of `accelerate launch` with `args`, an adapter, and a base in 4 bits."""
    if launch.parallelism is not None:
        yield from _problems_of_parallelism(launch)
    if launch.dynamo != DynamoBackend.NO:
        reason = f"{REFUSED['torch_compile'].partition(';')[0]}. Launch with `--dynamo_backend no`"
        yield f"accelerate was launched with the dynamo backend {launch.dynamo.value!r}: {reason}."
    # accelerate has DDP wrap the model of a process that a launcher for several has started, even a single one.
    if args.gradient_dtype == "bfloat16" and launch.fsdp is None and (launch.deepspeed or "LOCAL_RANK" in os.environ):
        yield (
            "gradient_dtype='bfloat16' with DDP or DeepSpeed: they add gradients up in memory of the masters' dtype. Launch one process "
            "without a launch file, several with FSDP2, or use gradient_dtype='float32'."
        )
    if launch.fsdp is not None:
        yield from _problems_of_fsdp(launch.fsdp, args, has_adapter, is_in_4bit)
    if launch.deepspeed is not None:
        yield from _problems_of_zero(launch.deepspeed.deepspeed_config, args, has_adapter)


def _problems_of_parallelism(launch: Launch) -> Iterator[str]:
    sizes = {name: getattr(launch.parallelism, name) for name in ("tp_size", "cp_size", "sp_size")}
    if split := [f"{name}={size}" for name, size in sizes.items() if size > 1]:
        yield (
            f"accelerate was launched with {', '.join(split)}, which splits matrices or sequences over processes and is unsupported. "
            "Only dp_replicate_size and dp_shard_size may be above 1, with FSDP2."
        )
    elif launch.fsdp is None:
        yield "accelerate was launched with a `parallelism_config` and without FSDP2, which is untested. Remove it."


def problems_of_ignored_sharding(launch: Launch, device: str, num_processes: int) -> Iterator[str]:
    """Yield a problem if accelerate ignores a request for FSDP or DeepSpeed."""
    for name, found in (("FSDP", launch.fsdp), ("DEEPSPEED", launch.deepspeed)):
        if found is None and _asks_for(name):
            where = f"{num_processes} {device.upper()} processes. Use `distributed_type: MULTI_CPU`"
            yield f"accelerate was launched with {name}, but shards only on GPUs: whole masters would be on {where}."


def check_launch(accelerator: Accelerator, args: Any, model: nn.Module) -> None:
    """
    Check the settings of `accelerate launch` again, now that accelerate has completed them, and have FSDP2 add up
    gradients and DeepSpeed keep masters in float32. `ValueError` lists unsupported settings.
    """
    launch = Launch.of(accelerator)
    is_in_4bit = getattr(base_model(model), "is_loaded_in_4bit", False)
    problems = [*problems_of_ignored_sharding(launch, accelerator.device.type, accelerator.num_processes)]
    raise_problems([*problems, *problems_of_launch(launch, args, is_peft_model(model), is_in_4bit)])
    if launch.fsdp is not None:
        _keep_float32_sums(launch.fsdp, args)
        given = getattr(args.accelerator_config, "gradient_accumulation_kwargs", None) or {}
        if _is_offloaded(launch.fsdp) and args.gradient_accumulation_steps > 1 and not given.get("sync_each_batch"):
            logger.warning(
                "gradient_accumulation_steps=%d with fsdp_offload_params: true: each GPU holds whole float32 gradients while micro-batches "
                'are added up. accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}} adds them up in host memory.',
                args.gradient_accumulation_steps,
            )
    if launch.deepspeed is not None:
        zero = launch.deepspeed.deepspeed_config.get("zero_optimization", {})
        if (zero.get("offload_param") or {}).get("device") == "cpu":
            text = "DeepSpeed moves float32 masters to the GPU, and FSDP2 with `fsdp_offload_params: true` low-bit weights."
            logger.info(text)
        keep_float32_masters(launch.deepspeed.deepspeed_config)


def launched_precision() -> str:
    """Return the `mixed_precision` that accelerate was launched with, `"no"` without a launch."""
    return os.environ.get(_PRECISION_VARIABLE, "no")


def as_launched(args: Any) -> AbstractContextManager[None]:
    """Return a context in which this process looks like one that these arguments of `accelerate launch` start.
    `ValueError` is raised if accelerate cannot read its configuration file."""
    file = None
    path = args.config_file or (default_config_file if os.path.isfile(default_config_file) and not args.cpu else None)
    if path is not None:
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            said = " ".join(str(error).split())
            raise ValueError(f"The accelerate configuration {path} cannot be read: {said}.") from error
        if not isinstance(content, dict):
            raise ValueError(f"The accelerate configuration {path} holds no options. `accelerate config` writes one.")
        file = load_config_from_file(path)
    precision = args.mixed_precision or getattr(file, "mixed_precision", None) or "no"
    processes = args.num_processes or getattr(file, "num_processes", torch.cuda.device_count())
    return patch_environment(**{_PRECISION_VARIABLE: precision, _PROCESSES_VARIABLE: processes})


def launched_processes() -> int:
    """Return the number of processes in [`as_launched`], 0 elsewhere."""
    return max(int(os.environ.get(_PROCESSES_VARIABLE, 0)), 0)


def problems_of_precision(args: Any) -> Iterator[str]:
    """Yield a problem if a forward would compute in 16 bits, as the launch says, and scales and export in float32."""
    launched = launched_precision()
    if launched != "no" and args.bf16 is False and not args.fp16:
        said = f"accelerate was launched with `mixed_precision: {launched}`, in which the forward would compute"
        yield f"bf16=False, but {said}. Use bf16=True, or launch with `--mixed_precision no`"


def problems_of_resumed_launch(launch: Launch, folder: str | Path) -> Iterator[str]:
    """Yield a problem if this launch cannot load the optimizer state of the checkpoint in `folder`."""
    theirs = _launch_of(folder)
    if theirs not in (None, launch.name):
        yield (
            f"The checkpoint {folder} was written with {theirs}, and this run with {launch.name} would not find its optimizer state. "
            f"Launch with {theirs}{_advice_to_start_anew(folder)}."
        )


def check_resumed_launch(accelerator: Accelerator, folder: str | Path) -> None:
    """
    Check that this launch can load the optimizer state of the checkpoint in `folder`; every process has to call.
    `ValueError` is raised for a checkpoint of another launch, or of another number of processes with DeepSpeed.
    """
    launch = Launch.of(accelerator)
    raise_problems(problems_of_resumed_launch(launch, folder))
    if launch.deepspeed is None or _launch_of(folder) is None:
        return
    # Every process lists the files that it sees, because machines need not share the folder.
    parts = [path.name for path in Path(folder).glob(_DEEPSPEED_STATES)]
    count = len(set(gather_object(parts)))
    if count != accelerator.num_processes:
        raise ValueError(
            f"The checkpoint {folder} was written by {count} processes with DeepSpeed, and this run has "
            f"{accelerator.num_processes}. Launch with `--num_processes {count}`{_advice_to_start_anew(folder)}."
        )


def _launch_of(folder: str | Path) -> str | None:
    """Return the launch that wrote a checkpoint, `None` if it was saved with `save_only_model=True`."""
    return next((launch for files, launch in _LAUNCHES_BY_FILES.items() if any(Path(folder).glob(files))), None)


def _advice_to_start_anew(folder: str | Path) -> str:
    files = ("model.safetensors", "model.safetensors.index.json", f"{SHARDS_FOLDER}/.metadata")
    has_masters = any(Path(folder, name).exists() for name in files)
    return ", or start a new run from its masters by passing it as the model" if has_masters else ""


def _keep_float32_sums(plugin: Any, args: Any) -> None:
    policy = plugin.mixed_precision_policy
    if policy is not None and args.numerics in ("engine", "exact"):
        # Engine operations round masters themselves and do not round activations between layers.
        policy = plugin.mixed_precision_policy = replace(policy, param_dtype=None, output_dtype=None)
    if policy is not None and policy.reduce_dtype not in (None, torch.float32):
        logger.info("FSDP2 adds up gradients in float32, not in %s.", policy.reduce_dtype)
        plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32)


def _problems_of_fsdp(plugin: Any, args: Any, has_adapter: bool, is_in_4bit: bool) -> Iterator[str]:
    if plugin.fsdp_version != 2:
        yield "accelerate was launched with FSDP1, which splits rows of masters. Use `fsdp_version: 2`."
        return
    if has_adapter:
        if is_in_4bit:
            yield "a base of bitsandbytes with FSDP2: its weights are not sharded here. Remove `quantization_config`"
        if args.lora_mode == "merged" and not plugin.reshard_after_forward:
            yield "lora_mode='merged' with fsdp_reshard_after_forward=false: gathered weights keep the adapter. Use true"
    if plugin.auto_wrap_policy is size_based_auto_wrap_policy:
        yield "fsdp_auto_wrap_policy=SIZE_BASED_WRAP wraps parts of layers. Use TRANSFORMER_BASED_WRAP"
    if args.save_only_model and plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT:
        yield "save_only_model=True with fsdp_state_dict_type: SHARDED_STATE_DICT: parts are not saved alone. Use FULL_STATE_DICT"
    if args.sync_ref_model:
        yield "sync_ref_model=True with FSDP2: writes to the reference's gathered weights are lost. Remove it"
    kind = _kind_of_optimizer(args)
    if kind in _WITHOUT_SHARDS:
        yield f"optim={optimizer_name(args)!r} with FSDP2: {_WITHOUT_SHARDS[kind]}"
    elif _is_offloaded(plugin) and kind not in (None, "torch", "torchao"):
        why = "it is not known to step in host memory. Use 'muon', 'muon_8bit' or 'adamw_torch_fused'"
        yield f"optim={optimizer_name(args)!r} with fsdp_offload_params: true: {why}"
    if not args.quantize_learner:
        yield "quantize_learner=False with FSDP2, which gathers low-bit weights only. Remove it, or use DDP"


def _is_offloaded(plugin: Any) -> bool:
    return isinstance(plugin.cpu_offload, CPUOffloadPolicy)


def _problems_of_zero(config: Mapping[str, Any], args: Any, has_adapter: bool) -> Iterator[str]:
    # accelerate has completed `config`; `given` is the content of `deepspeed_config_file`.
    file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    given = {} if file == "none" else HfDeepSpeedConfig(file).config
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage not in (1, 2, 3):
        yield f"zero_stage={stage} shards nothing. Use 1, 2 or 3, or launch with DDP (`accelerate launch --multi_gpu`)"
    if stage == 3:
        if has_adapter:
            yield "an adapter with zero_stage=3, which divides its factors. Use FSDP2, or stage 2 with lora_mode='merged'"
        if args.numerics in ("engine", "exact"):
            yield f"numerics={args.numerics!r} with zero_stage=3: it is untested. Use numerics='fast', or launch with DDP"
        if args.sync_ref_model:
            yield f"sync_ref_model=True with zero_stage=3: {_OTHER_LAUNCHES}"
        if zero.get("zero_quantized_weights"):
            yield "zero_quantized_weights=true with DeepSpeed: masters would be rounded to 8 bits. Remove it"
        if not zero.get("stage3_gather_16bit_weights_on_model_save"):
            yield "zero3_save_16bit_model=false with zero_stage=3: checkpoints would lack `model.safetensors`. Use true"
        if args.precisions is not None:
            yield f"precisions={args.precisions} with zero_stage=3: {_OTHER_LAUNCHES}"
    for name in ("offload_optimizer", "offload_param"):
        device = (zero.get(name) or {}).get("device")
        if device not in (None, "none", "cpu"):
            yield f"{name}_device={device!r} with DeepSpeed: it is untested. Use none or cpu"
    for name in ("bf16", "fp16", "torch_autocast"):
        # accelerate derives `bf16.enabled` from `mixed_precision: bf16`, which is undone later.
        found = (given if name == "bf16" else config).get(name) or {}
        if found.get("enabled") is True:
            yield f"{name}.enabled=true in DeepSpeed's configuration: {_ROUNDED}"
    for name, option in (("optimizer", "optim"), ("scheduler", "lr_scheduler_type")):
        if name in config:
            yield f"{name!r} in DeepSpeed's configuration: `{option}` selects it. Remove it"
    if _kind_of_optimizer(args) != "torch":
        why = "it needs matrices or is untested, and gets flat slices of masters. Use 'adamw_torch_fused', or FSDP2"
        yield f"optim={optimizer_name(args)!r} with DeepSpeed: {why}"
    if has_adapter and stage != 3 and args.lora_mode == "adapter":
        why = "it broadcasts all parameters, and cannot send low-bit ones. Use lora_mode='merged', or FSDP2 or DDP"
        yield f"lora_mode='adapter' with DeepSpeed: {why}"


def _kind_of_optimizer(args: Any) -> str | None:
    """Return the optimizer's package, or its kind if that is in [`_WITHOUT_SHARDS`]; `None` for Muon."""
    name = optimizer_name(args)
    for kind in ("GaLore", "APOLLO", "Adafactor"):
        if kind.lower() in name:
            return kind
    if name in MUONS:
        return None
    optimizer_class, _ = Trainer.get_optimizer_cls_and_kwargs(args)
    return optimizer_class.__module__.partition(".")[0]


def check_agreement(accelerator: Accelerator, record: Mapping[str, Any]) -> None:
    """Compare the settings of all processes, which all have to call: with different schemes they would wait for each
    other forever. `ValueError` on every process names the first difference."""
    if accelerator.num_processes == 1:
        return
    records = gather_object([dict(record)])
    for rank, other in enumerate(records):
        names = [name for name in {**records[0], **other} if other.get(name) != records[0].get(name)]
        if names:
            raise ValueError(
                f"The processes were configured differently: {names[0]}={records[0].get(names[0])!r} on process 0, "
                f"{other.get(names[0])!r} on process {rank}. Give all of them the same options and files."
            )
