"""Configuration of [`QaRLTrainer`]."""

import functools
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from transformers.utils import is_torch_xla_available
from trl import GRPOConfig
from typing_extensions import override

from ..checks import configuration as checks
from ..checks.conflicts import problems_of_conflicts
from ..checks.launch import launched_precision, launched_processes, problems_of_precision
from ..checks.names import RENAMED, problems_of_names
from ..checks.problems import raise_problems
from ..checks.refused import REFUSED
from ..checks.values import as_dict, problems_of_values
from ..objectives.registry import get_objective, problems_of_objective
from ..options import CHOICES, MUONS, EngineOptions, LearnerOptions, ObjectiveOptions, QuantOptions, describe_options
from ..quantization.gemm import has_fast_bf16
from ..quantization.plan import parse_scheme
from ..sharding.zero3 import keep_float32_masters


logger = logging.getLogger(__name__)


# TRL gives `True` for these to `generate`.
_SET_BY_TRL = ("do_sample", "disable_compile")
_BATCH_SIZES = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    *("steps_per_generation", "generation_batch_size", "num_generations", "num_generations_eval"),
)


def _collect_unknown_names(cls: type) -> type:
    """Let the constructor of a dataclass keep options that it does not have in `_unknown`, for its `__post_init__`."""
    init = cls.__init__

    @functools.wraps(init)
    def collect(self, *args, **kwargs):
        self._unknown = {name: kwargs.pop(name) for name in [*kwargs] if name not in cls.__dataclass_fields__}
        init(self, *args, **kwargs)

    cls.__init__ = collect
    return cls


@_collect_unknown_names
@describe_options
@dataclass
class QaRLConfig(QuantOptions, ObjectiveOptions, LearnerOptions, EngineOptions, GRPOConfig):
    # docstyle-ignore
    r"""
    Configuration class for the [`QaRLTrainer`].

    It inherits every option of [`~trl.GRPOConfig`], [`~trl_qarl.options.QuantOptions`],
    [`~trl_qarl.options.ObjectiveOptions`], [`~trl_qarl.options.LearnerOptions`] and
    [`~trl_qarl.options.EngineOptions`]. Some defaults differ from TRL's and follow the paper's Table 2
    (https://huggingface.co/papers/2604.07853): `optim="muon"`, `weight_decay=0.01`, and eight updates per generation
    batch (`steps_per_generation=8 * gradient_accumulation_steps` unless one of `steps_per_generation` and
    `generation_batch_size` is given). The table's batch sizes and lengths (512 completions in mini-batches of 64,
    2,048 and 16,384 tokens) depend on the hardware and stay at TRL's values.

    Without an accelerator `use_cpu` is switched on. On a CPU `bf16` defaults to `True` if the processor multiplies
    bfloat16 matrices natively, or if accelerate was launched with `mixed_precision: bf16`. A value that is given is
    kept, and has to agree with the launch.

    `trl-qarl train --help` shows the texts of the parameters.

    One `ValueError` lists all problems with their fixes: unknown names, values that cannot be, and inherited options
    that are not honoured.

    Parameters:
        optim (`str`, *optional*, defaults to `"muon"`):
            `"muon"` for `torch.optim.Muon` on the hidden matrices and AdamW on everything else, or any optimizer name
            of [`~transformers.TrainingArguments`], such as `"adamw_torch"`. `"muon_8bit"` is `"muon"` with its state
            in 8 bits, except for second moments of embeddings and experts.
        gradient_dtype (`str`, *optional*, defaults to `"float32"`):
            Dtype in which gradients are kept until the optimizer's step: `"float32"`, or `"bfloat16"` with
            `optim="muon_8bit"` and torchao's 8-bit and 4-bit AdamW. With FSDP2 processes still add them up in float32.
        weight_decay (`float`, *optional*, defaults to `0.01`):
            Weight decay of the optimizer.
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "objective_kwargs"]

    optim: str = "muon"
    gradient_dtype: str = field(default="float32", metadata={"choices": list(CHOICES["gradient_dtype"])})
    weight_decay: float = 0.01

    # True if `steps_per_generation` has our default, which the trainer lowers to what the dataset fills.
    chooses_steps = False

    def __post_init__(self):
        defaults = {option.name: option.default for option in fields(self)}
        unknown = vars(self).pop("_unknown", {})
        problems = [*problems_of_names(unknown, defaults)]
        for name in RENAMED.keys() & unknown.keys():
            if getattr(self, RENAMED[name], None) == defaults.get(RENAMED[name]) and RENAMED[name] in defaults:
                # The value is checked like one under the new name.
                setattr(self, RENAMED[name], unknown[name])
        problems += self._parse()
        for name, problem in [*problems_of_values(self, GRPOConfig)]:
            problems.append(problem)
            # So that the checks below can go on. TRL compares the sizes of batches with each other.
            for each in _BATCH_SIZES if name in _BATCH_SIZES else (name,):
                setattr(self, each, defaults[each])
        self._choose_device()
        problems += self.problems()
        if problems:
            for name in REFUSED.keys() & defaults.keys():
                setattr(self, name, defaults[name])
        elif get_objective(self) is not None:
            # TRL would compute and log a weight that the loss does not use.
            self.vllm_importance_sampling_correction = False
        try:
            self._finish()
        except Exception as error:
            # A `TypeError` is that of a dictionary with an unknown key.
            if not problems and not isinstance(error, TypeError):
                raise
            # The configuration is not used: only what TRL and transformers have to say counts.
            problems += [str(error)] if isinstance(error, ValueError | TypeError | OSError) else []
        raise_problems(problems)
        if self.deepspeed_plugin is not None:
            # transformers loads a model into the slices of ZeRO-3 by this copy of the configuration.
            keep_float32_masters(self.deepspeed_plugin.dschf.config)
        raise_problems(checks.check_turns(self))
        # Some options switch on others: `torch_compile_backend` switches on `torch_compile`.
        raise_problems(checks.refused_by_all(self))

    @property
    @override
    def world_size(self) -> int:
        """Also counts processes that are about to be launched."""
        return launched_processes() or super().world_size

    @property
    def is_colocated(self) -> bool:
        """True if vLLM runs in this process."""
        return self.use_vllm and self.vllm_mode == "colocate"

    @property
    def starts_engine(self) -> bool:
        """True if this process runs vLLM or starts its server."""
        return self.is_colocated or (self.use_vllm and self.vllm_server_autostart)

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the options as they are now: scripts set some of them on a configuration."""
        values = [problem for _, problem in problems_of_values(self, GRPOConfig)]
        yield from values
        if values:
            # The checks below read them.
            return
        yield from checks.check_scheme(self)
        yield from checks.check_numerics(self)
        yield from problems_of_objective(self)
        yield from checks.check_choices(self)
        yield from problems_of_conflicts(self)
        yield from checks.check_inherited(self)
        yield from checks.check_trackers(self)
        yield from checks.check_schedule(self)
        yield from checks.check_gradient_checkpointing(self)
        yield from checks.check_generation_kwargs(self)
        yield from checks.check_gpu(self)
        yield from problems_of_precision(self)
        yield from checks.check_hub(self)

    def _parse(self) -> Iterator[str]:
        """Write paths as text, and no tracker or strategy as "none" and "no"; parse options that may be text of a
        command line, and yield a problem for text that is none."""
        if self.report_to in (None, "None"):
            # YAML takes `None` for a text.
            self.report_to = "none"
        for name in ("eval_strategy", "save_strategy", "logging_strategy"):
            # YAML takes `no` for this.
            if getattr(self, name) is False:
                setattr(self, name, "no")
        for name, value in [*vars(self).items()]:
            if isinstance(value, Path):
                setattr(self, name, str(value))
        try:
            self.scheme = parse_scheme(self.scheme)
        except ValueError as error:
            yield str(error)
            self.scheme = type(self).scheme
        if not hasattr(self.parallelism_config, "cp_enabled") and self.parallelism_config is not None:
            yield f"parallelism_config={self.parallelism_config!r} has options of the launch. Give them there (`accelerate launch --config_file`)."
            self.parallelism_config = None
        for name in self._VALID_DICT_FIELDS:
            if not name.endswith("_kwargs"):
                # It may be the name of a file, and `open` takes a number for a file that is open.
                if isinstance(value := getattr(self, name), Real | list):
                    setattr(self, name, None)
                    if value is not False:
                        yield f"{name}={value!r} is of type {type(value).__name__}. Give a dictionary, or the name of a JSON file."
                elif (
                    name == "accelerator_config"
                    and isinstance(value, str)
                    and value[:1] != "{"
                    and not Path(value).is_file()
                ):
                    setattr(self, name, None)
                    yield f"{name}={value!r} is no file. Give a dictionary, or the name of a JSON file."
                continue
            try:
                value = as_dict(self, name)
            except ValueError as error:
                yield str(error)
                setattr(self, name, None)
                continue
            if name == "objective_kwargs":
                self.objective_kwargs = value or None
            elif name == "generation_kwargs" and True in map(value.get, _SET_BY_TRL):
                # vLLM has no such options.
                self.generation_kwargs = {k: v for k, v in value.items() if k not in _SET_BY_TRL or v is not True}

    def _finish(self) -> None:
        """Set the number of updates per generation batch, and run TRL's own initialization."""
        self._forget_derived()
        self.chooses_steps = self.steps_per_generation is None and self.generation_batch_size is None
        if self.chooses_steps:
            self.steps_per_generation = 8 * self.gradient_accumulation_steps
        # transformers does not know this optimizer name; the trainer builds the optimizer.
        optim = self.optim
        if optim in MUONS:
            self.optim = "adamw_torch"
        super().__post_init__()
        if optim in MUONS:
            self.optim = optim

    def _forget_derived(self) -> None:
        """Unset what TRL has derived in a configuration that this one copies, as `dataclasses.replace` does: TRL
        refuses a size of the generation batch with a number of its steps."""
        steps, processes = self.steps_per_generation, int(os.environ.get("WORLD_SIZE") or 1)
        if steps and self.generation_batch_size == self.per_device_train_batch_size * processes * steps:
            self.generation_batch_size = None
            if steps == 8 * self.gradient_accumulation_steps:
                self.steps_per_generation = None

    def _choose_device(self) -> None:
        if int(os.environ.get("WORLD_SIZE") or 1) == 1:
            # accelerate would look for other processes.
            self.ddp_backend = None
        has_accelerator = torch.accelerator.is_available() or is_torch_xla_available()
        is_chosen = not self.use_cpu and not has_accelerator
        if is_chosen:
            self.use_cpu = True
        if self.use_cpu and self.bf16 is None and not self.fp16:
            self.bf16 = launched_precision() == "bf16" or has_fast_bf16()
        if is_chosen:
            text = "No accelerator was found: training on the CPU (use_cpu=True) with bf16=%s, fp16=%s."
            logger.warning(text, self.bf16, self.fp16)


def config_for(model: Any, args: Any) -> QaRLConfig:
    """Return `args`, or for `None` a configuration named after `model`, a name or a model. `TypeError` is raised if
    `args` is a configuration of another class."""
    if args is None:
        from trl.trainer.utils import get_config_model_id

        # What is no model is refused later, with everything else.
        model_name = model if isinstance(model, str) else get_config_model_id(getattr(model, "config", None))
        return QaRLConfig(f"{Path(model_name).name}-QaRL")
    if not isinstance(args, QaRLConfig):
        raise TypeError(
            f"`args` must be a QaRLConfig, got {type(args).__name__}. QaRLConfig takes the options of GRPOConfig: replace the "
            "name (`from trl_qarl import QaRLConfig`)."
        )
    return args
