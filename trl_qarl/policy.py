"""
[`Policy`]: the model that is trained, from its name to what is served and saved of it. It knows no trainer.

There is one time at which it is prepared: once TRL has made the model and its adapter and transformers has put them on their device,
and before TRL makes anything of them, such as a reference or an engine. [`PreparesPolicy`] is there in the order of constructors.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from trl.trainer.base_trainer import _BaseTrainer

from .adapters.base import base_fingerprint, keep_adapter_precise, load_policy, prepare_base
from .adapters.engine import lora_arguments
from .adapters.tensors import describe_adapter, is_adapter_folder
from .checkpoint.cards import described_settings
from .checkpoint.export import export_checkpoint
from .checkpoint.record import check_record, scheme_record
from .checks.adapter import problems_of_adapted_model
from .checks.arguments import check_dropout, check_launch, problems_of_masters
from .checks.options import raise_problems
from .numerics.attach import attach_engine_numerics
from .numerics.availability import choose_numerics
from .numerics.exact import Exactness
from .quantization.names import is_peft_model
from .quantization.swap import SwapReport, disable_quantized_forward, prepare_model


__all__ = ["Policy", "PreparesPolicy"]

logger = logging.getLogger(__name__)


class Policy:
    """
    The model that is trained, and what a run says, serves and saves of it.

    Args:
        args ([`QaRLConfig`]):
            Configuration of the run.
        peft_config ([`~peft.PeftConfig`], *optional*):
            Adapter that TRL will give the model.

    Attributes:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The model, once it is prepared.
        has_adapter (`bool`):
            Whether an adapter is trained beside a frozen base.
        dtype (`torch.dtype`):
            Dtype of scales, and of everything in the engine that is not quantized.
        swap_report ([`SwapReport`]):
            Which layers were quantized, how, and which were not.
        numerics (`str`):
            How the learner computes: `"engine"` or `"fast"`.
        exactness ([`~trl_qarl.numerics.exact.Exactness`]):
            What happens where that is not how the engine computed.
    """

    model: Any
    has_adapter: bool
    dtype: torch.dtype
    swap_report: SwapReport
    numerics: str

    def __init__(self, args: Any, peft_config: Any = None):
        self.args, self._peft_config = args, peft_config
        self.exactness = Exactness(args.exact, is_asked_for=args.numerics is not None)
        self._adapter_folder: str | None = None
        self._loaded_adapter: dict[str, torch.Tensor] = {}
        self._base: str | None = None

    def load(self, name_or_path: str, **model_init_kwargs) -> nn.Module:
        """Return the model of that name, in place of TRL's `create_model_from_path`: also an adapter's folder, or a low-bit base."""
        model = load_policy(name_or_path, self._peft_config, model_init_kwargs)
        if is_adapter_folder(name_or_path):
            self._adapter_folder = name_or_path
            self._loaded_adapter = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        return model

    def prepare(self, model: Any) -> None:
        """
        Quantize `model`, in place, and choose the numerics.

        Raises:
            ValueError: if the model cannot be trained as configured, naming all that is wrong.
        """
        args = self.args
        self.model, self.has_adapter = model, is_peft_model(model)
        if self.has_adapter:
            keep_adapter_precise(model, self._loaded_adapter)
            self._loaded_adapter = {}
        raise_problems([*problems_of_masters(model, args, self.has_adapter)])
        if self.has_adapter:
            raise_problems([*problems_of_adapted_model(model)])
        check_dropout(model, args)
        self.dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else model.dtype
        self._quantize()
        if not args.quantize_learner:
            disable_quantized_forward(model)
        self.numerics, reason = choose_numerics(args, model, self.dtype)
        logger.info("numerics=%r: %s", self.numerics, reason)
        logger.info("quantize_learner=%s, %s", args.quantize_learner, self.swap_report)

    @property
    def _swap_arguments(self) -> dict[str, Any]:
        return {"exclude_modules": self.args.exclude_modules, "scale_dtype": self.dtype}

    def _quantize(self) -> None:
        args = self.args
        if not self.has_adapter:
            self.swap_report = prepare_model(self.model, args.plan, **self._swap_arguments)
            return
        self.swap_report = prepare_base(
            self.model,
            args.plan,
            keep_masters=not args.quantize_learner,
            is_merged=args.lora_mode == "merged",
            **self._swap_arguments,
        )
        self._base = base_fingerprint(self.model)
        if self._adapter_folder is not None:
            check_record(self._adapter_folder, self.record())

    def attach_numerics(self, model: Any) -> None:
        """Have `model` compute with the numerics of the run, once TRL has given it the head that computes log-probs."""
        if self.numerics == "engine":
            attach_engine_numerics(
                model,
                self.dtype,
                self.args.temperature,
                adapter_rank=lora_arguments(model).get("max_lora_rank"),
            )

    def check_engine(self, engine: Mapping[str, Any]) -> None:
        """Raise where exactness is required, and the engine of that description has other arithmetic than the learner."""
        rank = lora_arguments(self.model).get("max_lora_rank")
        self.exactness.check_engine(engine, on_gpu=self.model.device.type == "cuda", adapter_rank=rank)

    def prepare_reference(self, model: Any) -> None:
        """Prepare `model` to be what the learner is kept close to: as the learner started, the low-bit model."""
        if self.args.quantize_learner:
            prepare_model(model, self.swap_report.plan, **self._swap_arguments)
        self.attach_numerics(model)

    def record(self) -> dict[str, Any]:
        """Return what the weights of a checkpoint are trained for, to tell it from others."""
        record = scheme_record(self.args, self.swap_report.plan, self.dtype)
        if self.has_adapter:
            record |= {"lora_mode": self.args.lora_mode, "base": self._base}
        return record

    def describe(self) -> dict[str, Any]:
        """Return what the record of a run says of its policy."""
        described = {"model": self.model.name_or_path, "numerics": self.numerics}
        return described | describe_adapter(self.model, self.args.lora_mode)

    def card_facts(self) -> dict[str, Any]:
        """Settings that a model card names."""
        settings = {"objective": self.args.objective, **self.record(), "temperature": self.args.temperature}
        settings |= described_settings(self.swap_report.plan)
        return {name: value for name, value in settings.items() if value is not None}

    def export(self, folder: Path, processing_class: Any, card: Mapping[str, Any]) -> Path:
        """Write the low-bit policy as [`export_checkpoint`] does, and return the folder."""
        return export_checkpoint(self.model, folder, processing_class, self.dtype, card=dict(card))


class PreparesPolicy(_BaseTrainer):
    """
    Prepares `policy` where TRL's trainers call transformers' constructor. To be inherited from after TRL's trainer, so that it
    comes between the two.
    """

    policy: Policy

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        check_launch(self.accelerator, is_sharded=self.is_fsdp_enabled or self.is_deepspeed_enabled)
        self.policy.prepare(self.model)
