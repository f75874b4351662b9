"""[`QaRLTrainer`]: the order of calls of quantization-aware reinforcement learning on quantized rollouts."""

import inspect
import json
import logging
import shutil
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers import GenerationConfig, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.extras.profiling import profiling_context
from trl.trainer.utils import get_config_model_id
from typing_extensions import override

from .checks import (
    PICTURES,
    check_arguments,
    check_dropout,
    check_launch,
    problems_of_masters,
)
from .muon import create_muon_adamw
from .numerics.attach import attach_engine_numerics
from .numerics.exact import describe_difference, largest_difference
from .objectives.presets import PRESETS, rejects_by_product
from .objectives.tbpo import reduce_tbpo_metrics, tbpo_loss, tbpo_metrics
from .objectives.weights import mismatch_ratio, mismatch_weight, sequence_log_ratio, weigh_advantages
from .qarl_config import QaRLConfig, raise_problems
from .quantization.schemes import get_scheme
from .quantization.swap import deactivate, low_bit_forward, prepare_model, quantized_layers
from .resume import (
    ROLLOUT_STATE_FILE,
    SCHEME_FILE,
    TRAINER_STATE_FILE,
    last_complete_checkpoint,
)
from .rollout.engines import server_process
from .rollout.generation import EngineLost, QaRLVLLMGeneration, all_or_none, use_generation_factory
from .rollout.server import exit_on_sigterm
from .rollout.transformers_rollout import record_sampling_logps
from .telemetry.bounds import sequence_bounds, token_bounds
from .telemetry.codes import (
    DEAF_FLIP_RATE,
    DEAF_UPDATES,
    code_flip_rate,
    is_deaf,
    sampled_masters,
    sqnr,
    update_to_step,
)
from .telemetry.mismatch import (
    mismatch_metrics,
    mismatch_sums,
    ratio_histograms,
    split_metrics,
    split_sums,
    weight_metrics,
)
from .telemetry.probe import (
    MAX_SCORED,
    NUM_PROBES,
    TOP_K,
    compare_positions,
    learner_log_probs,
    likeliest,
    probe_metrics,
    top_log_probs,
)
from .telemetry.run_log import RunLog
from .telemetry.text import has_loop, is_garbled, worst_examples


__all__ = ["QaRLTrainer"]

logger = logging.getLogger(__name__)

# accelerate calls the device of a process among several on a CPU "cpu:0", which `torch.load` does not know: no run of several
# processes on a CPU could be resumed. Called after torch's own.
torch.serialization.register_package(
    100, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
)

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
    a straight-through gradient. `objective="tbpo"` replaces GRPO's loss by TBPO's trust band; `alignment` leaves the learner, or
    everything, in high precision for comparison.

    Args:
        args ([`QaRLConfig`], *optional*):
            Configuration. Defaults to `QaRLConfig("{model}-QaRL")`.

    All other arguments are those of [`~trl.GRPOTrainer`]; `peft_config`, PEFT models and `quantization_config` raise.

    Attributes:
        swap_report ([`SwapReport`]):
            Which layers were quantized, how, and which were not.
        histogram_bounds (`list[tuple[str, str, tuple[float | None, float | None]]]`):
            Quantity, sign of the advantage and bounds of each row of [`~QaRLTrainer.take_histograms`]: tokens, and for
            objectives of sequence ratios also sequences.
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
        check_arguments(
            model,
            args,
            train_dataset,
            eval_dataset,
            quantization_config,
            peft_config,
            optimizers,
            rollout_func,
            has_environment=environment_factory is not None,
        )
        self._preset = PRESETS.get(args.objective)
        self._counts_sequences = sequence_bounds(args) is not None
        bounds = token_bounds(args) | (sequence_bounds(args) or {})
        self.histogram_bounds = [(name, sign, pair) for name, signs in bounds.items() for sign, pair in signs.items()]
        self._histograms: torch.Tensor | None = None
        self._worst_examples: list[dict[str, Any]] = []
        self._batch_metrics: list[dict[str, float]] = []
        self._next_probe = 0
        self._calls_tools = False
        self._rollout_seconds = self._batch_seconds = self._forward_backward_seconds = 0.0
        with use_generation_factory(self._make_generation) if args.use_vllm else nullcontext():
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
        if rollout_func is not None:
            self.rollout_func = self._shared(rollout_func)
        if not args.use_vllm:
            self._prepare_policy()
            self.generation_config = _OwnGenerationConfig(**self.generation_config.to_dict())
            if args.cast_lm_head_to_fp32:
                # TRL casts the inputs, which autocast undoes in the rollout; its own scoring turns autocast off.
                head = self.model.get_output_embeddings()
                head.forward = torch.autocast(self.model.device.type, enabled=False)(head.forward)
        if self.ref_model is not None and args.alignment == "aligned":
            # The learner starts as the low-bit model, so that is what it is kept close to.
            prepare_model(
                self.accelerator.unwrap_model(self.ref_model), self.swap_report.scheme, **self._swap_arguments
            )
        if self.ref_model is not None and args.numerics == "engine":
            attach_engine_numerics(self.accelerator.unwrap_model(self.ref_model), self._scale_dtype, args.temperature)
        self.add_callback(_Requantize(self))
        self.add_callback(RunLog(self))

    def _prepare_policy(self) -> None:
        check_launch(self)
        args = self.args
        raise_problems([*problems_of_masters(self.model, args)])
        check_dropout(self.model, args)
        self._scale_dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else self.model.dtype
        self._swap_arguments = {
            "exclude_modules": args.exclude_modules,
            "scale_dtype": self._scale_dtype,
        }
        scheme = get_scheme("bf16") if args.alignment == "none" else get_scheme(args.scheme, args.group_size)
        self.swap_report = prepare_model(self.model, scheme, **self._swap_arguments)
        if args.alignment == "rollout-only":
            deactivate(self.model)
        if args.numerics == "engine":
            attach_engine_numerics(self.model, self._scale_dtype, args.temperature)
        logger.info("alignment %s, numerics %s, %s", args.alignment, args.numerics, self.swap_report)

    def _make_generation(self, **kwargs):
        """The rollout engine, made in the middle of TRL's constructor; it needs to know which layers are quantized."""
        self._prepare_policy()
        return QaRLVLLMGeneration(
            **kwargs,
            dtype=self._scale_dtype,
            weight_version=lambda: str(self.state.global_step),
            server=server_process(self.args, self.model, self._scale_dtype)
            if self.args.vllm_server_autostart
            else None,
            request_timeout=self.args.vllm_request_timeout,
            generation_timeout=self.args.vllm_generation_timeout,
            token_file=self.args.vllm_token_file,
        )

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
    def _generate_single_turn(self, prompt_ids, images, *args, **kwargs):
        """
        Returns the sampling log-probs with the completions; without vLLM, generates under autocast as the learner scores. A
        failure of one process is raised by all.
        """
        if self.use_vllm and images is not None:
            raise ValueError(PICTURES)
        # Between calls of tools, processes generate each as often as they need.
        generate = self._generate_and_measure if self._calls_tools else self._shared(self._generate_and_measure)
        return generate(prompt_ids, images, *args, **kwargs)

    @override
    def _tool_call_loop(self, *args, **kwargs):
        """As TRL's; a failure of one process is raised by all."""
        self._calls_tools = True
        try:
            return self._shared(super()._tool_call_loop)(*args, **kwargs)
        finally:
            self._calls_tools = False

    def _shared(self, function):
        """`function`, of which a failure of one process is raised by all."""

        def shared(*args, **kwargs):
            with all_or_none(self.accelerator):
                return function(*args, **kwargs)

        return shared

    def _generate_and_measure(self, prompt_ids, *args, **kwargs):
        start = time.perf_counter()
        if self.use_vllm:
            completion_ids, logps = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        else:
            model = self.accelerator.unwrap_model(self.model_wrapped)
            recording = record_sampling_logps(model, self.temperature)
            with recording as recorded, low_bit_forward(model), self.accelerator.autocast():
                completion_ids, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            logps = recorded[0].cpu().tolist()
            logps = [row[: len(ids)] for row, ids in zip(logps, completion_ids, strict=True)]
        num_tokens = sum(len(ids) for ids in completion_ids)
        mode = "train" if self.model.training else "eval"
        seconds = time.perf_counter() - start
        self._rollout_seconds += seconds
        self._metrics[mode]["rollout/seconds"].append(seconds)
        self._metrics[mode]["rollout/tokens_per_second"].append(num_tokens / seconds)
        self._metrics[mode]["rollout/mean_length"].append(num_tokens / max(len(completion_ids), 1))
        return completion_ids, logps

    @override
    def _generate(self, prompts):
        """Publishes what has changed, before, and measures how many completions loop or are garbled."""
        if self.use_vllm:
            self._publish_what_changed()
        output = super()._generate(prompts)
        _, completion_ids, _, completions, *_ = output
        loops = sum(has_loop(ids) for ids in completion_ids)
        garbled = sum(is_garbled(_text(completion)) for completion in completions)
        sums = torch.tensor([len(completions), loops, garbled], device=self.accelerator.device)
        total, loops, garbled = self.accelerator.reduce(sums, reduction="sum").tolist()
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["rollout/repetition_share"].append(loops / max(total, 1))
        metrics["rollout/garbled_share"].append(garbled / max(total, 1))
        return output

    @override
    def _generate_and_score_completions(self, inputs):
        """Adds the learner's log-probs where TRL leaves them out and measures mismatch and quantization error."""
        start, self._rollout_seconds = time.perf_counter(), 0.0
        try:
            output = super()._generate_and_score_completions(inputs)
        except EngineLost:
            self._save_before_leaving()
            raise
        if "sampling_per_token_logps" not in output:
            raise ValueError(
                "`rollout_func` returned `logprobs=None`, so the mismatch between rollout and learner is unknown. Return "
                "the log-prob of every sampled token."
            )
        if "old_per_token_logps" not in output:
            batch_size = self.args.per_device_train_batch_size
            with torch.no_grad():
                output["old_per_token_logps"], _, _ = self._score(self.model, output, batch_size=batch_size)
        if not self.use_vllm and self._preset is not None and self._preset.corrects_mismatch:
            # TRL does it for vLLM rollouts only.
            output["importance_sampling_ratio"] = mismatch_ratio(
                output["old_per_token_logps"],
                output["sampling_per_token_logps"],
                _loss_mask(output),
                self.vllm_importance_sampling_mode,
                self.vllm_importance_sampling_clip_min,
                self.vllm_importance_sampling_clip_max,
            )
        self._log_rollout_metrics(output)
        if self.args.numerics == "engine":
            self._check_exact(output)
        self._batch_seconds = time.perf_counter() - start
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["step/scoring_seconds"].append(self._batch_seconds - self._rollout_seconds)
        return output

    def _check_exact(self, output: dict[str, Any]) -> None:
        """Raises, or warns, where a sampled token's log-prob is not the learner's, bit for bit."""
        mask = _loss_mask(output)
        largest, *_ = largest_difference(output["old_per_token_logps"], output["sampling_per_token_logps"], mask)
        overall = self.accelerator.gather(torch.tensor([largest], device=self.accelerator.device)).max().item()
        if overall == 0.0:
            return
        llm = self.vllm_generation.llm if self.use_vllm and self.vllm_mode == "colocate" else None
        where = describe_difference(output, mask, self.accelerator.unwrap_model(self.model), llm)
        message = f"numerics='engine': the largest mismatch is {overall:.3g} and not 0: {where}."
        if self.args.exact == "require":
            raise RuntimeError(f"{message} exact='warn' trains on it nevertheless.")
        logger.warning(message)

    def _publish_what_changed(self) -> None:
        """In TRL's place, which looks at the step alone and not at what a callback writes into the weights at one step."""
        if self._last_loaded_step == self.state.global_step and self.vllm_generation.is_published():
            return
        start = time.perf_counter()
        with all_or_none(self.accelerator), profiling_context(self, "sync_weights"):
            self.vllm_generation.sync_weights()
        self._last_loaded_step = self.state.global_step
        self._rollout_seconds += time.perf_counter() - start

    def _save_before_leaving(self) -> None:
        """Saves what was trained, unless it is saved: nobody must find a complete checkpoint half overwritten."""
        if self.state.global_step == 0:
            return
        folder = self._checkpoint_folder(trial=None)
        # The main process decides, as it is the one that completes the folder.
        is_saved = [(folder / TRAINER_STATE_FILE).is_file()]
        broadcast_object_list(is_saved, from_process=0)
        if is_saved[0]:
            logger.warning("%s is complete and stays as it is.", folder)
        else:
            self._save_checkpoint(self.model, trial=None)
        # A launcher ends the other processes as soon as one has failed.
        self.accelerator.wait_for_everyone()

    def _checkpoint_folder(self, trial) -> Path:
        return Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"

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
        splits, maxima = split_sums(old, sampling, output["advantages"], mask)
        if sums.device.type == "mps":
            sums, splits, maxima = sums.float(), splits.float(), maxima.float()
        weights = self.accelerator.gather(mismatch_weight(old, sampling, mask, self.args.mismatch_cap))
        advantages = self.accelerator.gather(output["advantages"])
        maxima = self.accelerator.gather(maxima).view(-1, len(maxima)).amax(0)
        sums = self.accelerator.reduce(sums, reduction="sum")
        splits = self.accelerator.reduce(splits, reduction="sum")
        maximum = self.accelerator.gather(maximum).max()
        of_batch = {
            **mismatch_metrics(sums, maximum, weights),
            **split_metrics(splits, maxima),
            **weight_metrics(weights, advantages),
            **sqnr(quantized_layers(self.model)),
        }
        # TRL computes it for every vLLM rollout; TBPO has a weight of its own.
        ratio = None if self.args.objective == "tbpo" else output.get("importance_sampling_ratio")
        if ratio is not None and self.vllm_importance_sampling_mode.endswith("mask"):
            counts = mask.bool() if ratio.shape == mask.shape else torch.ones_like(ratio, dtype=torch.bool)
            of_batch["mismatch/rejected_share"] = self._masked_mean((ratio == 0).float(), counts)
        if self.use_vllm:
            of_batch |= self.vllm_generation.take_publication()
            of_batch["rollout/weight_version"] = float(self._last_loaded_step)
        for name, value in of_batch.items():
            metrics[name].append(value)
        if self.model.training:
            self._batch_metrics.append({"reward": metrics["reward"][-1], **of_batch})
            self._note_worst_examples(output)
            self._probe_mismatch(output)

    def _note_worst_examples(self, output: dict[str, Any]) -> None:
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        self._worst_examples += worst_examples(
            output["old_per_token_logps"],
            output["sampling_per_token_logps"],
            _loss_mask(output),
            output["advantages"],
            _without_padding(output["prompt_ids"], output["prompt_mask"]),
            _without_padding(output["completion_ids"], output["completion_mask"]),
            tokenizer.decode,
        )

    def take_worst_examples(self) -> list[dict[str, Any]]:
        """What [`~trl_qarl.telemetry.text.worst_examples`] found in the generation batches since the last call, on this process."""
        examples, self._worst_examples = self._worst_examples, []
        return examples

    def take_batch_metrics(self) -> list[dict[str, float]]:
        """Reward, mismatch and publication of each generation batch since the last call."""
        batches, self._batch_metrics = self._batch_metrics, []
        return batches

    def _probe_mismatch(self, output: dict[str, Any]) -> None:
        """Compares learner and engine over the whole vocabulary on the first few completions, where it is time to."""
        every = self.args.mismatch_probe_steps
        is_server = self.use_vllm and self.vllm_mode == "server"
        if not every or self.state.global_step < self._next_probe or (is_server and not self.is_world_process_zero()):
            return
        self._next_probe = self.state.global_step + every
        if any(output.get(key) is not None for key in _FORWARD_KEYS):
            logger.warning("The mismatch was not probed: the prompts hold more than text.")
            return
        prompts = _without_padding(output["prompt_ids"], output["prompt_mask"])[:NUM_PROBES]
        completions = _without_padding(output["completion_ids"], output["completion_mask"])[:NUM_PROBES]
        # The last token is left out: the engine generates one more, for which a full context has no room.
        completions = [ids[:-1][:MAX_SCORED] for ids in completions]
        sequences = [(p + c, len(c)) for p, c in zip(prompts, completions, strict=True) if c]
        if not sequences:
            return
        try:
            metrics = probe_metrics([self._compare_with_engine(ids, count) for ids, count in sequences])
        except ConnectionError as error:
            # The next publication or rollout gets the server back.
            logger.warning("The mismatch was not probed: %s", error)
            return
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def _compare_with_engine(self, ids: list[int], count: int) -> tuple[torch.Tensor, torch.Tensor]:
        model, device = self.accelerator.unwrap_model(self.model), self.accelerator.device
        with self.accelerator.autocast():
            learner_logps = learner_log_probs(model, torch.tensor(ids, device=device), count)
            if self.use_vllm:
                engine_ids, engine_logps = likeliest(self.vllm_generation.top_log_probs([ids], TOP_K)[0][-count:])
            else:
                with low_bit_forward(model):
                    engine_ids, engine_logps = top_log_probs(
                        learner_log_probs(model, torch.tensor(ids, device=device), count)
                    )
        return compare_positions(engine_ids.to(device), engine_logps.to(device), learner_logps)

    @override
    def training_step(self, *args, **kwargs):
        """Measures forward and backward alone; TRL's `step_time` includes what happens once per generation batch."""
        start, self._batch_seconds = time.perf_counter(), 0.0
        loss = super().training_step(*args, **kwargs)
        self._synchronize()
        self._forward_backward_seconds += time.perf_counter() - start - self._batch_seconds
        # TRL has closed the step.
        if self._current_train_step_time == 0.0:
            self._metrics["train"]["step/forward_backward_seconds"].append(self._forward_backward_seconds)
            self._forward_backward_seconds = 0.0
        return loss

    def _synchronize(self) -> None:
        """A device that computes in the background would otherwise be timed with whoever waits for it first."""
        if self.accelerator.device.type != "cpu":
            torch.accelerator.synchronize(self.accelerator.device)

    @override
    def _compute_loss(self, model, inputs):
        """
        TBPO instead of TRL's losses for `objective="tbpo"`; KL to the reference and MoE auxiliary loss as in TRL. The other
        objectives are TRL's losses, for some with other advantages.
        """
        if self.args.objective != "tbpo":
            weighed = inputs
            if self._preset is not None:
                ratio = None if self.use_vllm else inputs.get("importance_sampling_ratio")
                advantages = weigh_advantages(inputs["advantages"], ratio, self._preset.is_positive_only)
                weighed = inputs | {"advantages": advantages}
            loss = super()._compute_loss(model, weighed)
            self._count_ratios(self._forward_logps, inputs)
            return loss
        mask = _loss_mask(inputs)
        per_token_logps, entropies, aux_loss = self._score(
            model, inputs, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled
        )
        self._count_ratios(per_token_logps, inputs)
        loss, output = tbpo_loss(
            per_token_logps,
            inputs["old_per_token_logps"],
            inputs["sampling_per_token_logps"],
            inputs["advantages"],
            mask,
            positive_epsilon_high=self.args.positive_epsilon_high,
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

    @override
    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        """
        Counts positions from the first token that is not padding, as the rollout does, and keeps the log-probs for what is
        measured beside TRL's losses, which do not return them.
        """
        forward = _count_positions(model) if _takes_positions(self.accelerator.unwrap_model(model)) else model
        output = super()._get_per_token_logps_and_entropies(forward, *args, **kwargs)
        self._forward_logps = output[0].detach()
        return output

    @torch.no_grad()
    def _count_ratios(self, per_token_logps: torch.Tensor, inputs: dict[str, Any]) -> None:
        if not self.model.training:
            return
        old, sampling = inputs["old_per_token_logps"], inputs["sampling_per_token_logps"]
        mask, advantages = _loss_mask(inputs), inputs["advantages"]
        tokens = torch.stack([per_token_logps - old, old - sampling]).flatten(1)
        of_tokens = advantages.unsqueeze(1).expand_as(old).flatten()
        counts = ratio_histograms(tokens, of_tokens, mask.bool().flatten())
        if self._counts_sequences:
            log_weight = sequence_log_ratio(old, sampling, mask)
            if rejects_by_product(self.args):
                log_weight = log_weight * mask.sum(-1)
            sequences = torch.stack([sequence_log_ratio(per_token_logps, old, mask), log_weight])
            counts = torch.cat([counts, ratio_histograms(sequences, advantages, mask.bool().any(-1))])
        self._histograms = counts if self._histograms is None else self._histograms + counts

    def take_histograms(self) -> torch.Tensor | None:
        """
        Counts `(R, 49)` of one update, in the order of `histogram_bounds`, over all processes and all micro-batches since the
        last call, or `None`. Every process has to call it.
        """
        if self._histograms is None:
            return None
        counts, self._histograms = self._histograms, None
        return self.accelerator.reduce(counts, reduction="sum")

    def _masked_mean(self, values: torch.Tensor, mask: torch.Tensor) -> float:
        totals = self.accelerator.reduce(torch.stack([(values.detach() * mask).sum(), mask.sum().float()]))
        return (totals[0] / totals[1].clamp(min=1.0)).item()

    @override
    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs):
        """
        With `resume_from_checkpoint=True`, resumes from the last checkpoint that was written completely. A vLLM server that
        was started here ends with training, however that ends, SIGTERM included. The next rollout publishes whatever the step count says, as
        `load_best_model_at_end` may have changed the weights.
        """
        restore_sigterm = exit_on_sigterm() if self.use_vllm and self.is_world_process_zero() else None
        try:
            return super().train(resume_from_checkpoint=self.find_checkpoint(resume_from_checkpoint), **kwargs)
        finally:
            if self.use_vllm:
                self._last_loaded_step = -1
                self.vllm_generation.stop_server()
            if restore_sigterm is not None:
                restore_sigterm()

    def find_checkpoint(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """
        Checkpoint folder to resume from, `None` for a new run.

        Raises:
            ValueError: if there is no such checkpoint, or if it was trained with another scheme or alignment.
        """
        if not resume_from_checkpoint:
            return None
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir)
        folder = Path(resume_from_checkpoint)
        if not folder.is_dir():
            raise ValueError(
                f"resume_from_checkpoint={resume_from_checkpoint!r} is not a folder. Give a checkpoint's."
            )
        if not (folder / SCHEME_FILE).is_file():
            logger.warning("%s has no %s: it was not written by QaRLTrainer.", folder, SCHEME_FILE)
            return resume_from_checkpoint
        theirs, ours = json.loads((folder / SCHEME_FILE).read_text()), self._scheme_record()
        theirs.setdefault("alignment", "aligned")
        if theirs != ours:
            raise ValueError(
                f"The checkpoint {folder} was trained with {theirs}, this run uses {ours}. Resume with the same settings, "
                "or start a new run from its masters by passing it as the model."
            )
        return resume_from_checkpoint

    @override
    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Writes the masters, as TRL does, and beside them which scheme they were trained for."""
        super()._save(output_dir, state_dict)
        path = Path(output_dir if output_dir is not None else self.args.output_dir) / SCHEME_FILE
        path.write_text(json.dumps(self._scheme_record(), indent=2) + "\n")

    def _scheme_record(self) -> dict[str, Any]:
        scheme, excluded = self.swap_report.scheme, self.args.exclude_modules
        return {
            "scheme": scheme.name,
            "alignment": self.args.alignment,
            "group_size": scheme.group_size,
            "exclude_modules": list(excluded) if isinstance(excluded, tuple) else excluded,
            "scale_dtype": str(self._scale_dtype).removeprefix("torch."),
        }

    @override
    def _save_checkpoint(self, model, trial):
        """Also saves the generation batch in progress, so that a resumed run goes on with the same completions."""
        folder = self._checkpoint_folder(trial)
        folder.mkdir(parents=True, exist_ok=True)
        # Before the rest: `trainer_state.json`, which TRL writes last, then marks a complete checkpoint.
        state = {"shape": self._rollout_shape(), "step": self._step, "buffered_inputs": self._buffered_inputs}
        torch.save(state, folder / ROLLOUT_STATE_FILE.format(rank=self.accelerator.process_index))
        super()._save_checkpoint(model, trial)

    @override
    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Uploads the scheme with the model files, of which transformers copies those it knows."""
        if self.is_world_process_zero():
            shutil.copy(Path(checkpoint_folder) / SCHEME_FILE, self.args.output_dir)
        super()._push_from_checkpoint(checkpoint_folder)

    @override
    def _load_optimizer_and_scheduler(self, checkpoint):
        """Also restores the generation batch in progress, or drops it where this run's batches have another shape."""
        super()._load_optimizer_and_scheduler(checkpoint)
        path = Path(checkpoint or "") / ROLLOUT_STATE_FILE.format(rank=self.accelerator.process_index)
        if checkpoint is None or not path.is_file():
            # Where processes were added, the others find another `num_processes` and start a new batch too.
            return
        state = torch.load(path, map_location=self.accelerator.device, weights_only=True)
        theirs, ours = state["shape"], self._rollout_shape()
        if theirs == ours:
            self._step, self._buffered_inputs = state["step"], state["buffered_inputs"]
        else:
            changed = ", ".join(
                f"{name}={theirs[name]} there, {ours[name]} here" for name in ours if theirs[name] != ours[name]
            )
            logger.warning(
                "The generation batch in progress of %s does not fit this run (%s). It is dropped, and training goes on "
                "with a new one. Resume with the same values to use it.",
                checkpoint,
                changed,
            )

    def _rollout_shape(self) -> dict[str, int]:
        """What a generation batch is divided into and how often it is used."""
        return {
            "num_processes": self.accelerator.num_processes,
            "per_device_train_batch_size": self._train_batch_size,
            "steps_per_generation": self.args.steps_per_generation,
            "num_generations": self.num_generations,
            "num_iterations": self.num_iterations,
        }


class _OwnGenerationConfig(GenerationConfig):
    """
    Generation configuration that stays as it is where the model has one of its own.

    `generate` fills every field that is `None` from the model's, so its `min_p` would truncate rollouts while
    `QaRLConfig(min_p=None)` says that nothing does.
    """

    @override
    def update(self, defaults_only=False, allow_custom_entries=False, **kwargs):
        """Leaves out the update from the model's configuration, the only one that allows custom entries."""
        return kwargs if allow_custom_entries else super().update(defaults_only=defaults_only, **kwargs)


class _Requantize(TrainerCallback):
    """Quantizes the masters after each optimizer step, logs how many codes changed, and warns once where none do."""

    def __init__(self, trainer: QaRLTrainer):
        self.trainer = trainer
        self.has_warned = False
        self._rates: deque[float] = deque(maxlen=DEAF_UPDATES)
        self._masters: dict[str, torch.Tensor] = {}
        self._start = 0.0

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._start = time.perf_counter()
        self._masters = sampled_masters(quantized_layers(self.trainer.model))

    def on_optimizer_step(self, args, state, control, **kwargs):
        layers = quantized_layers(self.trainer.model)
        rate = code_flip_rate(layers.values())
        metrics = self.trainer._metrics["train"]
        self.trainer._synchronize()
        metrics["step/optimizer_seconds"].append(time.perf_counter() - self._start)
        if not layers:
            return
        metrics["quant/code_flip_rate"].append(rate)
        relative = update_to_step(self._masters, layers)
        metrics["quant/update_to_step"].append(relative)
        self._rates.append(rate)
        if not self.has_warned and is_deaf(self._rates):
            self.has_warned = True
            logger.warning(
                "The low-bit policy is deaf to its updates: in each of the last %d updates less than %g of its codes "
                "changed, and the last one moved the masters by %.1e quantization steps on average. Raise `learning_rate` "
                "(%g here) and keep the masters in float32 (they are %s).",
                DEAF_UPDATES,
                DEAF_FLIP_RATE,
                relative,
                args.learning_rate,
                str(next(iter(layers.values())).weight.dtype).removeprefix("torch."),
            )

    def on_step_end(self, args, state, control, **kwargs):
        if args.sync_ref_model:
            # TRL's callback, which comes before this one, writes through `.data`, which no layer can notice where a loss
            # scaler skipped the optimizer's step.
            for layer in quantized_layers(self.trainer.ref_model).values():
                layer.invalidate()


def _takes_positions(model: nn.Module) -> bool:
    # A model of pictures and text counts in several dimensions, by itself.
    is_text_model = model.config.get_text_config() is model.config
    return is_text_model and "position_ids" in inspect.signature(model.forward).parameters


def _count_positions(model: nn.Module) -> Callable[..., Any]:
    """Forward of `model` that counts positions from the first token that is not padding."""

    def forward(**inputs):
        position_ids = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        return model(**inputs, position_ids=position_ids)

    return forward


def _text(completion: str | list[dict[str, Any]]) -> str:
    if isinstance(completion, str):
        return completion
    contents = (message.get("content") for message in completion)
    return "\n".join(content for content in contents if isinstance(content, str))


def _without_padding(ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    return [row[keep].tolist() for row, keep in zip(ids, mask.bool(), strict=True)]


def _loss_mask(inputs: dict[str, Any]) -> torch.Tensor:
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
