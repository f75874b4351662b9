"""[`QaRLTrainer`]: the order of calls of quantization-aware reinforcement learning on quantized rollouts."""

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.trainer.utils import get_config_model_id
from typing_extensions import override

from .optim import create_muon_adamw
from .qarl_config import QaRLConfig
from .rollout.embedded import record_sampling_logps
from .schemes import get_scheme
from .swap import prepare_model, quantized_layers
from .tbpo import mismatch_weight, reduce_tbpo_metrics, sequence_log_ratio, tbpo_loss, tbpo_metrics
from .telemetry import code_flip_rate, mismatch_metrics, mismatch_sums, sqnr


__all__ = ["SCHEME_FILE", "QaRLTrainer"]

logger = logging.getLogger(__name__)

SCHEME_FILE = "qarl.json"
_ROLLOUT_STATE_FILE = "rollout_state_{rank}.pt"
_TRAINER_STATE_FILE = "trainer_state.json"

# Inputs of a generation batch that the model's forward takes beside tokens and masks.
_FORWARD_KEYS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


class QaRLTrainer(GRPOTrainer):
    """
    Trainer for Quantization-aware Reinforcement Learning (QaRL), https://huggingface.co/papers/2604.07853.

    It takes the arguments of [`~trl.GRPOTrainer`]. The model's linear layers get a quantized forward, so rollouts,
    old log-probs and the loss all see the low-bit weights, while the optimizer updates the high-precision masters through
    a straight-through gradient. `objective="tbpo"` replaces GRPO's loss by TBPO's trust band.

    Args:
        args ([`QaRLConfig`], *optional*):
            Configuration. Defaults to `QaRLConfig("{model}-QaRL")`.

    All other arguments are those of [`~trl.GRPOTrainer`]; `peft_config`, PEFT models and `quantization_config` raise.

    Attributes:
        swap_report ([`SwapReport`]):
            Which layers were quantized, how, and which were not.
    """

    _tag_names = ["trl", "qarl"]
    _name = "QaRL"
    _paper = {
        "title": "QaRL: Rollout-Aligned Quantization-Aware RL for Fast and Stable Training under Training-Inference Mismatch",
        "id": "2604.07853",
    }

    def __init__(
        self,
        model,
        reward_funcs=None,
        args: QaRLConfig | None = None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        reward_processing_classes=None,
        callbacks=None,
        optimizers=(None, None),
        quantization_config=None,
        peft_config=None,
        tools=None,
        rollout_func=None,
        environment_factory=None,
    ):
        if args is None:
            model_name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = QaRLConfig(f"{model_name.split('/')[-1]}-QaRL")
        _check_arguments(model, args, train_dataset, quantization_config, peft_config, optimizers)
        super().__init__(
            model=model,
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            # Chosen through `accelerate launch`, which the configuration does not see.
            raise NotImplementedError(
                "FSDP and DeepSpeed shard the master weights, which is not supported in this release. Launch with DDP "
                "(`accelerate launch --multi_gpu`)."
            )
        scheme = get_scheme(args.scheme, args.group_size)
        self._scale_dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else self.model.dtype
        swap = {"exclude_modules": args.exclude_modules, "scale_dtype": self._scale_dtype}
        self.swap_report = prepare_model(self.model, scheme, **swap)
        logger.info("%s", self.swap_report)
        if self.ref_model is not None:
            # The policy starts as the low-bit model, so that is what it is kept close to.
            prepare_model(self.accelerator.unwrap_model(self.ref_model), scheme, **swap)
        self.add_callback(_Requantize(self))

    @override
    def create_optimizer(self, model=None):
        """Builds Muon with AdamW for `optim="muon"`; every other name is TRL's."""
        if self.optimizer is None and self.args.optim == "muon":
            model = self.model if model is None else model
            self.optimizer = create_muon_adamw(
                model,
                set(self.get_decay_parameter_names(model)),
                lr=self.args.learning_rate,
                weight_decay=self.args.weight_decay,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                eps=self.args.adam_epsilon,
            )
        return super().create_optimizer(model)

    @override
    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        """Generates under autocast, as the learner scores, and returns the sampling log-probs with the completions."""
        model = self.accelerator.unwrap_model(self.model_wrapped)
        start = time.perf_counter()
        with record_sampling_logps(model, self.temperature) as recorded, self.accelerator.autocast():
            completion_ids, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        logps = recorded[0].cpu().tolist()
        logps = [row[: len(ids)] for row, ids in zip(logps, completion_ids, strict=True)]
        num_tokens = sum(len(ids) for ids in completion_ids)
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["rollout/tokens_per_second"].append(num_tokens / (time.perf_counter() - start))
        self._metrics[mode]["rollout/mean_length"].append(num_tokens / max(len(completion_ids), 1))
        return completion_ids, logps

    @override
    def _generate_and_score_completions(self, inputs):
        """Adds the learner's log-probs where TRL leaves them out and measures mismatch and quantization error."""
        output = super()._generate_and_score_completions(inputs)
        if "sampling_per_token_logps" not in output:
            raise ValueError(
                "`rollout_func` returned `logprobs=None`, so the mismatch between rollout and learner is unknown. Return "
                "the log-prob of every sampled token."
            )
        if "old_per_token_logps" not in output:
            batch_size = self.args.per_device_train_batch_size
            with torch.no_grad():
                output["old_per_token_logps"], _, _ = self._score(self.model, output, batch_size=batch_size)
        self._log_rollout_metrics(output)
        return output

    def _score(self, model, inputs: dict[str, Any], **kwargs):
        """Per-token log-probs `(B, T)`, entropies and auxiliary loss of the completions in `inputs`."""
        forward_kwargs = {key: inputs.get(key) for key in _FORWARD_KEYS}
        return self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            **forward_kwargs,
            **kwargs,
        )

    def _log_rollout_metrics(self, output: dict[str, Any]) -> None:
        metrics = self._metrics["train" if self.model.training else "eval"]
        old, sampling, mask = output["old_per_token_logps"], output["sampling_per_token_logps"], _loss_mask(output)
        sums, maximum = mismatch_sums(old, sampling, mask)
        if sums.device.type == "mps":
            sums = sums.float()
        weights = mismatch_weight(old, sampling, mask, self.args.mismatch_cap)
        sums = self.accelerator.reduce(sums, reduction="sum")
        maximum = self.accelerator.gather(maximum).max()
        for name, value in mismatch_metrics(sums, maximum, self.accelerator.gather(weights)).items():
            metrics[name].append(value)
        layers = quantized_layers(self.model)
        if layers:
            metrics["quant/sqnr"].append(sqnr(layers))

    @override
    def _compute_loss(self, model, inputs):
        """TBPO instead of TRL's losses for `objective="tbpo"`; KL to the reference and MoE auxiliary loss as in TRL."""
        if self.args.objective != "tbpo":
            return super()._compute_loss(model, inputs)
        mask = _loss_mask(inputs)
        per_token_logps, entropies, aux_loss = self._score(
            model, inputs, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled
        )
        loss, output = tbpo_loss(
            per_token_logps,
            inputs["old_per_token_logps"],
            inputs["sampling_per_token_logps"],
            inputs["advantages"],
            mask,
            epsilon_high=self.args.epsilon_high,
            negative_epsilon_low=self.args.negative_epsilon_low,
            negative_epsilon_high=self.args.negative_epsilon_high,
            mismatch_cap=self.args.mismatch_cap,
        )
        mode = "train" if self.model.training else "eval"
        metrics = self._metrics[mode]
        if self.beta != 0.0:
            log_ratio = inputs["ref_per_token_logps"] - per_token_logps
            per_token_kl = torch.exp(log_ratio) - log_ratio - 1
            if self.args.use_bias_correction_kl:
                sequence_ratio = sequence_log_ratio(per_token_logps, inputs["old_per_token_logps"], mask).exp()
                per_token_kl = per_token_kl * sequence_ratio.unsqueeze(1)
            sequence_kl = (per_token_kl * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)
            loss = loss + self.beta * sequence_kl.mean()
            metrics["kl"].append(self._masked_mean(per_token_kl, mask))
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss
            metrics["aux_loss"].append(self.accelerator.gather_for_metrics(aux_loss).mean().item())
        metrics["entropy"].append(self._masked_mean(entropies, mask))
        per_sequence = tbpo_metrics(output, inputs["advantages"])
        gathered = {name: self.accelerator.gather(values) for name, values in per_sequence.items()}
        for name, value in reduce_tbpo_metrics(gathered).items():
            metrics[name].append(value)
        return loss / (self.current_gradient_accumulation_steps if mode == "train" else 1.0)

    def _masked_mean(self, values: torch.Tensor, mask: torch.Tensor) -> float:
        totals = self.accelerator.reduce(torch.stack([(values.detach() * mask).sum(), mask.sum().float()]))
        return (totals[0] / totals[1].clamp(min=1.0)).item()

    @override
    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs):
        """With `resume_from_checkpoint=True`, resumes from the last checkpoint that was written completely."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _last_complete_checkpoint(self.args.output_dir)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    @override
    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Writes the masters, as TRL does, and beside them which scheme they were trained for."""
        super()._save(output_dir, state_dict)
        path = Path(output_dir if output_dir is not None else self.args.output_dir) / SCHEME_FILE
        path.write_text(json.dumps(self._scheme_record(), indent=2) + "\n")

    def _scheme_record(self) -> dict[str, Any]:
        scheme = self.swap_report.scheme
        return {
            "scheme": scheme.name,
            "group_size": scheme.group_size,
            "exclude_modules": self.args.exclude_modules,
            "scale_dtype": str(self._scale_dtype).removeprefix("torch."),
        }

    @override
    def _save_checkpoint(self, model, trial):
        """Also saves the generation batch in progress, so that a resumed run goes on with the same completions."""
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        # Before the rest: `trainer_state.json`, which TRL writes last, then marks a complete checkpoint.
        state = {"step": self._step, "buffered_inputs": self._buffered_inputs}
        torch.save(state, folder / _ROLLOUT_STATE_FILE.format(rank=self.accelerator.process_index))
        super()._save_checkpoint(model, trial)

    @override
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        """Refuses a checkpoint that was trained with another scheme."""
        path = Path(resume_from_checkpoint) / SCHEME_FILE
        if path.is_file():
            theirs, ours = json.loads(path.read_text()), self._scheme_record()
            if theirs != ours:
                raise ValueError(
                    f"The checkpoint {resume_from_checkpoint} was trained with {theirs}, this run uses {ours}. Resume "
                    "with the same settings, or start a new run from its masters by passing it as the model."
                )
        else:
            logger.warning("%s has no %s: it was not written by QaRLTrainer.", resume_from_checkpoint, SCHEME_FILE)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    @override
    def _load_optimizer_and_scheduler(self, checkpoint):
        """Also restores the generation batch in progress."""
        super()._load_optimizer_and_scheduler(checkpoint)
        path = Path(checkpoint or "") / _ROLLOUT_STATE_FILE.format(rank=self.accelerator.process_index)
        if checkpoint is not None and path.is_file():
            state = torch.load(path, map_location=self.accelerator.device, weights_only=True)
            self._step, self._buffered_inputs = state["step"], state["buffered_inputs"]


class _Requantize(TrainerCallback):
    """Quantizes the masters after each optimizer step and logs how many codes changed."""

    def __init__(self, trainer: QaRLTrainer):
        self.trainer = trainer

    def on_optimizer_step(self, args, state, control, **kwargs):
        rate = code_flip_rate(quantized_layers(self.trainer.model).values())
        self.trainer._metrics["train"]["quant/code_flip_rate"].append(rate)

    def on_step_begin(self, args, state, control, **kwargs):
        if args.sync_ref_model:
            # TRL's callback writes through `.data`, which no layer can notice.
            for layer in quantized_layers(self.trainer.ref_model).values():
                layer.invalidate()


def _loss_mask(inputs: dict[str, Any]) -> torch.Tensor:
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def _last_complete_checkpoint(output_dir: str) -> str:
    folders = Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    steps = sorted((int(f.name.rpartition("-")[2]), f) for f in folders if f.name.rpartition("-")[2].isdigit())
    for _, folder in reversed(steps):
        if (folder / _TRAINER_STATE_FILE).is_file():
            return os.fspath(folder)
        logger.warning("%s is incomplete (no %s) and is skipped.", folder, _TRAINER_STATE_FILE)
    raise ValueError(
        f"No complete checkpoint in {output_dir!r} to resume from. Start without `resume_from_checkpoint`."
    )


def _check_arguments(model, args, train_dataset, quantization_config, peft_config, optimizers) -> None:
    if not isinstance(args, QaRLConfig):
        raise TypeError(f"`args` must be a QaRLConfig, got {type(args).__name__}.")
    if peft_config is not None or hasattr(model, "peft_config"):
        raise NotImplementedError(
            "PEFT adapters are not supported in this release: merging an adapter into a low-bit base loses its signal. "
            "Train the full model, or wait for the next release."
        )
    if quantization_config is not None:
        raise ValueError(
            "quantization_config was given, but the master weights must stay in high precision. Remove it; "
            f"scheme={args.scheme!r} quantizes the forward."
        )
    columns = getattr(train_dataset, "column_names", None)
    if columns is not None and "prompt" not in columns:
        raise ValueError(
            f"The training dataset needs a `prompt` column, got {columns}. Rename the column that holds it."
        )
    if isinstance(model, nn.Module) and next(model.parameters()).dtype is torch.float16 and args.fp16:
        logger.warning(
            "The masters themselves are float16; updates of 1e-6 round to nothing. Load the model in float32."
        )
    if optimizers[0] is not None and args.optim == "muon":
        logger.info("`optimizers` was given, so `optim='muon'` is not used.")
