"""The policy being trained, independent of the trainer: loads the model, quantizes it, describes and exports it."""

import logging
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, patch_environment
from safetensors import SafetensorError
from torch import nn

from ..adapters.base import assign_base, base_fingerprint, keep_adapter_precise, load_policy, swap_base
from ..adapters.tensors import adapter_config, is_adapter_folder, lora_arguments
from ..bitwise import low_bit
from ..bitwise.attach import attach_engine_numerics
from ..bitwise.availability import choose_numerics
from ..bitwise.exact import Exactness, check_arithmetic
from ..bitwise.rows import reason_to_pad
from ..checkpoint.export import export_checkpoint
from ..checkpoint.files import damaged_file
from ..checkpoint.record import check_record, scheme_record
from ..checks.architectures import problem_of_architecture, problem_of_trial, problems_with_vllm
from ..checks.configuration import low_precision_masters
from ..checks.model import (
    check_output_head,
    correct_model,
    correct_policy,
    problems_of_division,
    problems_of_experts,
    problems_of_model,
)
from ..checks.problems import collect, raise_problems
from ..objectives.registry import get_objective
from ..quantization.fixed_scales import fixed_scales, scales_fingerprint
from ..quantization.inventory import Inventory
from ..quantization.names import base_model, is_peft_model
from ..quantization.precisions import set_precision
from ..quantization.schemes import QuantScheme
from ..quantization.storage import refresh
from ..quantization.swap import (
    assign_schemes,
    disable_quantized_forward,
    prepare_model,
    share_global_scales,
    swap_layers,
)
from ..sharding.fsdp2 import loads_once, shard_low_bit, zeros_without_memory


logger = logging.getLogger(__name__)


@dataclass
class Judgement:
    """
    Result of [`Policy.judge`]: the `problems` for which a model cannot be trained as configured. Without any, how it
    will be trained: the `schemes` of layers by name, the `reasons` why others stay in high precision, and for a placed
    model its `numerics` with their reason.
    """

    problems: list[str] = field(default_factory=list)
    schemes: dict[str, QuantScheme] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    numerics: tuple[str, str] = ("fast", "")


class Policy:
    """
    The policy of a run: prepared once, then described, published, exported and saved.

    Args:
        args ([`QaRLConfig`]):
            Configuration of the run.
        peft_config ([`~peft.PeftConfig`], *optional*):
            Adapter that TRL will give the model.
        has_pictures (`bool`, *optional*, defaults to `False`):
            Whether the policy is trained on a dataset with pictures.

    Attributes:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]), has_adapter (`bool`):
            The prepared model, and whether an adapter is trained over a frozen base.
        dtype (`torch.dtype`):
            Dtype of scales, and of everything in the engine that is not quantized.
        swap_report ([`SwapReport`]), numerics (`str`):
            Those of [`QaRLTrainer`].
        precision (`int` or `None`):
            Bits at which the policy runs; `None` for the bits of its schemes.
        takes_layouts (`bool`):
            Whether the model takes a batch as one row of tokens, a [`~trl_qarl.token_row.Layout`].
        exactness ([`~trl_qarl.bitwise.exact.Exactness`]):
            Response to a log-prob that differs from the engine's.
    """

    def __init__(self, args: Any, peft_config: Any = None, has_pictures: bool = False):
        self.args, self._peft_config = args, peft_config
        self.has_pictures = has_pictures
        self.exactness = Exactness(is_required=args.numerics == "exact")
        self._adapter_folder: str | None = None
        self._loaded_adapter: dict[str, torch.Tensor] = {}
        self._base: str | None = None
        self._reference: Any = None
        self._sharded_by: str | None = None
        self.precision: int | None = None
        self.takes_layouts = False

    def load(self, name_or_path: str, **model_init_kwargs) -> nn.Module:
        """Load a model like TRL's `create_model_from_path`, which takes no adapter's folder and no low-bit base: first
        the policy, then its reference."""
        is_reference = hasattr(self, "model")
        try:
            # TRL gives a reference to none of the processes that do not load it (1.16).
            by_all = patch_environment(fsdp_cpu_ram_efficient_loading="false")
            with by_all if is_reference else zeros_without_memory():
                model = load_policy(name_or_path, self._peft_config, model_init_kwargs)
        except SafetensorError as error:
            raise ValueError(
                f"The weights of {name_or_path!r} cannot be read: {damaged_file(name_or_path) or 'a file'} is cut or damaged ({error}). "
                "Copy or download it again."
            ) from error
        except TypeError as error:
            # transformers hands what it does not know to the class of the model.
            if "unexpected keyword argument" not in str(error):
                raise
            raise ValueError(f"`model_init_kwargs`: {error}. Correct or remove it.") from error
        if is_adapter_folder(name_or_path):
            self._adapter_folder = name_or_path
            self._loaded_adapter = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        return model

    def prepare(self, model: Any, sharded_by: str | None = None) -> None:
        """
        Quantize `model` in place and choose the numerics, once: after TRL has created the model and transformers has
        moved it to its device, and before TRL makes a reference model or an engine. `sharded_by` names what will shard
        the model: `"FSDP2"`, `"ZeRO-3"` or, for other stages, `"DeepSpeed"`.

        Raises:
            ValueError: if the model cannot be trained as configured; the message lists all problems that
                [`~Policy.judge`] finds, and the model is as it was.
        """
        args = self.args
        judged = self.judge(model, is_placed=True)
        raise_problems(judged.problems)
        self.model, self.has_adapter, self._sharded_by = model, is_peft_model(model), sharded_by
        correct_policy(model, args)
        self.dtype = self._engine_dtype(model)
        schemes, reasons = judged.schemes, judged.reasons
        if self.has_adapter:
            self.swap_report = swap_base(model, args.plan, schemes, reasons, self.dtype, **self._base_arguments)
            keep_adapter_precise(model, self._loaded_adapter)
            self._loaded_adapter = {}
            self._base = base_fingerprint(model)
        else:
            self.swap_report = swap_layers(model, args.plan, schemes, reasons, self.dtype)
            if scales := fixed_scales(model):
                self._base = scales_fingerprint(scales)
        if loads_once():
            # Of weights that the other processes do not have yet.
            inventory = Inventory.of(model)
            self._base, scales = broadcast_object_list([self._base, inventory.global_scales])
            share_global_scales(inventory.layers, scales)
        if self._adapter_folder is not None:
            # Only a quantized base has a fingerprint. This model is no one else's: it was loaded here.
            check_record(self._adapter_folder, self.record())
        if not args.quantize_learner:
            disable_quantized_forward(model)
        self.numerics, reason = judged.numerics
        if sharded_by is not None and args.numerics is None:
            self.numerics, reason = "fast", f"{sharded_by} shards the masters"
        logger.info("numerics=%r: %s", self.numerics, reason)
        self._choose_cpu_weights()
        logger.info("quantize_learner=%s, %s", args.quantize_learner, self.swap_report)

    def judge(self, model: nn.Module, is_placed: bool = False) -> Judgement:
        """Judge a loaded `model`, with its adapter, and change nothing. Of a model on the meta device, its layers are
        judged and not its dtypes; engine numerics are judged where `is_placed`, on its device."""
        args, base, has_adapter, dtype = self.args, base_model(model), is_peft_model(model), self._engine_dtype(model)
        judged = Judgement([*problems_of_model(model, args, self.has_pictures)])
        problems = judged.problems
        assign = partial(assign_base, **self._base_arguments) if has_adapter else assign_schemes
        try:
            schemes, reasons = assign(model, args.plan, exclude_modules=args.exclude_modules, scale_dtype=dtype)
        except ValueError as error:
            problems.append(str(error))
            return judged
        judged.schemes, judged.reasons = schemes, reasons
        problems += problems_of_experts(base, args, schemes, reasons)
        if args.use_vllm:
            # Its own dtype is not known before it is loaded.
            known = dtype if base.device.type != "meta" or args.bf16 or args.fp16 else None
            with_vllm = problems_with_vllm(base, known, args.use_cpu, schemes)
            problems += [f"use_vllm=True: {each}" for each in with_vllm]
        # Both may load vLLM, and a refused model needs none.
        if not problems:
            problems += self.problems_of_class(base, has_adapter, is_tried=not is_placed)
        if is_placed and (args.numerics is not None or not problems):
            # Under an objective, dropout that stays on is one of the problems.
            is_dropout_off = args.disable_dropout or get_objective(args) is not None
            with collect(problems):
                judged.numerics = choose_numerics(args, base, dtype, schemes, is_dropout_off)
        return judged

    def problems_of_class(self, base: nn.Module, has_adapter: bool, is_tried: bool = True) -> list[str]:
        """Return the problem of a class that a vLLM in this process has not, which this loads, or cannot run with an
        adapter next to its layers, or cannot make if that `is_tried`."""
        if not self.args.is_colocated:
            return []
        runs_beside = has_adapter and self.args.lora_mode == "adapter"
        problem = problem_of_architecture(base, runs_beside)
        if problem is None and is_tried:
            problem = problem_of_trial(base, self._engine_dtype(base))
        return [f"use_vllm=True: {problem}"] if problem else []

    def _engine_dtype(self, model: nn.Module) -> torch.dtype:
        return torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else model.dtype

    def _choose_cpu_weights(self) -> None:
        """Choose the form of weights in products of an engine on a CPU; a learner follows a server's choice."""
        args, is_local = self.args, self.args.is_colocated
        # Gathered weights are not kept.
        is_learner = self.numerics == "engine" and self._sharded_by is None and (is_local or not args.use_vllm)
        # Where FSDP2 will shard the model, it is still on the CPU.
        if args.device.type == "cpu" and (is_local or is_learner):
            copies = is_local + is_learner
            low_bit.use_cpu_weights(low_bit.choose_cpu_weights(self.model, self.dtype, copies, is_trained=True))

    def set_precision(self, precision: int | None) -> bool:
        """Run learner and reference at a number of bits, `None` for the bits of their schemes. Return whether the
        policy to publish has changed."""
        if precision == self.precision:
            return False
        self.precision = precision
        has_changed = False
        for model in (self.model, self._reference):
            if model is not None and set_precision(Inventory.of(model).layers, self.swap_report.schemes, precision):
                refresh(model)
                has_changed = True
        return has_changed

    @property
    def _base_arguments(self) -> dict[str, bool]:
        return {"keep_masters": not self.args.quantize_learner, "is_merged": self.args.lora_mode == "merged"}

    def attach_numerics(self, model: Any) -> None:
        """Make `model` compute with the run's numerics; call it after TRL has installed its head for log-probs."""
        if self.numerics == "engine":
            rank = lora_arguments(model).get("max_lora_rank")
            attach_engine_numerics(model, self.dtype, self.args.temperature, adapter_rank=rank)

    def check_head(self) -> None:
        """Raise `ValueError` if the loss has other log-probs than the model; TRL must have installed its head."""
        # Engine numerics have a head of their own, a sharded model a part of each weight, and bitsandbytes repacks its
        # weights on a CPU at the first forward without gradients.
        is_in_4bit = getattr(base_model(self.model), "is_loaded_in_4bit", False)
        if self.numerics == "fast" and self._sharded_by is None and not self.has_pictures and not is_in_4bit:
            check_output_head(self.model, self.args.temperature)

    def choose_layout(self, num_processes: int, has_aux_loss: bool) -> None:
        """Choose whether a batch is computed as one row of tokens, once the numerics are attached. `ValueError` is
        raised if its forward has to be divided and cannot be."""
        reason = reason_to_pad(self.model, self.args.device)
        self.takes_layouts = reason is None
        if self.args.max_tokens_per_forward is not None:
            raise_problems(problems_of_division(self.args, reason, num_processes, has_aux_loss))
        if reason is not None:
            self.pad_batches(reason)

    def pad_batches(self, reason: str = "its layers do not pass lengths on to their attention") -> None:
        """Compute padded batches from now on."""
        self.takes_layouts = False
        logger.info("Batches are padded, and a prompt is computed for each of its completions: %s.", reason)

    def check_engine(self, engine: Mapping[str, Any]) -> None:
        """Raise if exactness is required and the engine with this description computes unlike the learner."""
        if self.exactness.is_required:
            rank = lora_arguments(self.model).get("max_lora_rank")
            check_arithmetic(engine, on_gpu=self.model.device.type == "cuda", adapter_rank=rank)

    def prepare_reference(self, model: Any) -> None:
        """Prepare `model` as the reference of the KL term: the low-bit model at the start of training."""
        correct_model(model, self.args.use_vllm)
        if self.args.quantize_learner:
            excluded = self.args.exclude_modules
            prepare_model(model, self.swap_report.plan, exclude_modules=excluded, scale_dtype=self.dtype)
            if self._sharded_by == "FSDP2":
                shard_low_bit(model)
            self._reference = model
        self.attach_numerics(model)

    def record(self) -> dict[str, Any]:
        """Return the quantization settings of a checkpoint, which tell it from checkpoints of other runs."""
        record = scheme_record(self.args, self.swap_report.plan, self.dtype)
        if scales := Inventory.of(self.model).global_scales:
            record["global_scales"] = scales
        if self.has_adapter:
            record["lora_mode"] = self.args.lora_mode
        if self._base is not None:
            record["base"] = self._base
        return record

    def describe(self) -> dict[str, Any]:
        """Return the entries about the policy in the record of a run."""
        described = {"model": self.model.name_or_path, "numerics": self.numerics}
        if self.has_adapter:
            config = adapter_config(self.model)
            names = ("r", "lora_alpha", "use_rslora", "target_modules")
            described |= {"lora_mode": self.args.lora_mode, "lora": {name: config[name] for name in names}}
        return described

    def card_facts(self) -> dict[str, Any]:
        """Return the settings for a model card."""
        settings = {"loss_type": self.args.loss_type, **self.record(), "temperature": self.args.temperature}
        settings |= self.swap_report.plan.summary | {"precisions": self.args.precisions}
        return {name: value for name, value in settings.items() if value is not None and name != "global_scales"}

    def check_kept(self) -> None:
        """Raise `ValueError` if the model has lost its quantized layers, or the precision of its masters, since it was
        prepared."""
        if self.args.is_quantized and not Inventory.of(self.model).layers:
            raise ValueError("The model has no quantized layers (`restore_model`). Make another trainer of it.")
        for dtype in {parameter.dtype for parameter in self.model.parameters() if parameter.requires_grad}:
            raise_problems(low_precision_masters(self.args, dtype))

    def export(self, folder: Path, processing_class: Any, card: Mapping[str, Any]) -> Path:
        """
        Write the low-bit policy with [`export_checkpoint`], at the bits of its schemes, and return the folder. With
        sharded masters every process has to call, and an error of one process is raised by all.
        """
        self.check_kept()
        with self._at_own_bits():
            return export_checkpoint(self.model, folder, processing_class, self.dtype, card=dict(card))

    @contextmanager
    def _at_own_bits(self):
        precision = self.precision
        self.set_precision(None)
        try:
            yield
        finally:
            self.set_precision(precision)
