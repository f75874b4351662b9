"""[`QaRLTrainer`]: the sequence of steps of quantization-aware reinforcement learning on quantized rollouts."""

import logging
from collections.abc import Sized
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from trl import GRPOTrainer
from trl.data_utils import prepare_multimodal_messages
from trl.extras.profiling import profiling_context
from trl.trainer import grpo_trainer
from typing_extensions import override

from ..bitwise.low_bit import use_cpu_weights
from ..checkpoint.record import last_complete_checkpoint
from ..checks.arguments import problems_of_absence, problems_of_arguments
from ..checks.content import (
    check_columns,
    check_prompts,
    check_tokens,
    has_pictures,
    problem_of_end,
    problems_of_evaluation,
)
from ..checks.model import problems_of_pictures, warn_of_length
from ..checks.problems import raise_problems
from ..checks.resume import resume_option
from ..doctor.memory import check_host_memory
from ..engines.answers import checked_rollout_func, vocabulary_size
from ..engines.pictures import check_rows, count_pictures, expanded_prompts, open_pictures, placeholders_of
from ..engines.transformers_rollout import OwnGenerationConfig, record_sampling_logps
from ..forward import Batch
from ..objectives.registry import get_objective
from ..optimizers.muon import MuonAdamW
from ..optimizers.skipped_updates import SkipsUpdates
from ..options import MUONS
from ..processes import exit_on_signals, keep_freed_memory
from ..quantization.precisions import precision_at
from ..quantization.storage import is_sharded
from ..quantization.swap import quantized_forward
from ..replacing import replaced
from ..rollout.ahead import Prefetcher
from ..rollout.failures import EngineLost, all_or_none
from ..rollout.generation import QaRLVLLMGeneration
from ..rollout.rewards import checked_reward
from ..sharding import sharded_by
from ..sharding.zero3 import compute_in_bfloat16, forget_order
from ..telemetry.console import Advisor, show_rows
from ..telemetry.recorder import Recorder
from ..telemetry.run_log import RunLog
from .policy import Policy
from .qarl_config import QaRLConfig, config_for
from .saves import SavesRuns
from .trainer_mixins import PreparesPolicy, RefreshReference, ScoresRollouts


logger = logging.getLogger(__name__)

_PREPARED_ONCE = (
    "with FSDP2 and DeepSpeed accelerate prepares a model once, together with its optimizer. `eval_on_start=True` evaluates before a "
    "training. For another training, make a trainer of the saved masters."
)


class QaRLTrainer(SavesRuns, ScoresRollouts, GRPOTrainer, PreparesPolicy):
    """
    Trainer for Quantization-aware Reinforcement Learning (QaRL), https://huggingface.co/papers/2604.07853.

    It takes the arguments of [`~trl.GRPOTrainer`]. The model's linear layers get a quantized forward, so rollouts,
    old log-probs and the loss all see the low-bit weights, while the optimizer updates the high-precision masters
    through a straight-through gradient. `loss_type="tbpo"` replaces GRPO's loss by TBPO's trust band; for comparison,
    `quantize_learner=False` leaves the learner in high precision and `scheme="bf16"` everything.

    Args:
        args ([`QaRLConfig`], *optional*):
            Configuration. Defaults to `QaRLConfig("{model}-QaRL")`.

    All other arguments are those of [`~trl.GRPOTrainer`]; `quantization_config` is only for QLoRA. With `peft_config`,
    or a model that has an adapter, LoRA is trained over a frozen low-bit base.

    Attributes:
        export_dir (`Path`):
            Folder of the low-bit policy before it is pushed: by default in the output directory, named after the
            scheme or schemes.
        swap_report ([`SwapReport`]):
            Layers that were quantized, with their formats, and layers that were not.
        numerics (`str`):
            Arithmetic of the learner, as configured or chosen: `"engine"` or `"fast"`.
        recorder ([`~trl_qarl.telemetry.recorder.Recorder`]):
            Measurements of the run.
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
        model, reward_funcs = _without_paths(model), _without_paths(reward_funcs)
        args = config_for(model, args)
        given: dict[str, Any] = {**locals()}
        # `super` adds the class.
        del given["self"], given["__class__"]
        self.policy = Policy(args, peft_config, has_pictures(train_dataset, eval_dataset))
        problems = [*problems_of_arguments(self.policy, **given)]
        problems += problems_of_absence(args, train_dataset, eval_dataset, reward_funcs, environment_factory)
        raise_problems(problems)
        check_host_memory(args, model, peft_config)
        if args.device.type == "cpu":
            keep_freed_memory()
        self._own_optimizer = optimizers[0]
        if self._own_optimizer is not None and args.optim in MUONS:
            logger.info("`optimizers` was given, so optim=%r is not used.", args.optim)
        self.export_dir = Path(args.output_dir, args.plan.name)
        self._objective = get_objective(args)
        self._calls_tools = False
        self._longest = 0
        # TRL has no other point of injection for loading models and for rollouts.
        with replaced(
            grpo_trainer,
            create_model_from_path=self.policy.load,
            VLLMGeneration=self._make_generation,
            GenerationConfig=self._make_generation_config,
        ):
            super().__init__(**given)
        if problem := problem_of_end(self.processing_class):
            raise ValueError(problem)
        with all_or_none(self.accelerator):
            self.policy.check_head()
        self.policy.choose_layout(self.accelerator.num_processes, self.aux_loss_enabled)
        self.eos_token_ids = [*self.eos_token_ids, *_own_ends(args, self.eos_token_ids)]
        if self.is_deepspeed_enabled and args.bf16:
            # TRL has given the models another forward by now.
            for each in filter(None, (self.model, self.ref_model)):
                compute_in_bfloat16(self.accelerator.unwrap_model(each))
        generates_with_tools = not self.use_vllm and (tools or environment_factory)
        if generates_with_tools and sharded_by(self.accelerator) in ("FSDP2", "ZeRO-3"):
            raise NotImplementedError(
                "Tools with FSDP2 and ZeRO-3 need `use_vllm=True`: each process calls tools as often as it needs, but without vLLM "
                "all processes have to generate together."
            )
        if rollout_func is not None:
            checked = checked_rollout_func(rollout_func, vocabulary_size(self.model))
            self.rollout_func = all_or_none(self.accelerator)(checked)
        named = zip(self.reward_funcs, self.reward_func_names, strict=True)
        self.reward_funcs = [checked_reward(function, name) for function, name in named]
        if self.ref_model is not None:
            self.policy.prepare_reference(self.accelerator.unwrap_model(self.ref_model))
        if args.rollout_ahead:
            self._ahead = Prefetcher(self.vllm_generation, args)
        self.recorder = Recorder(args, self.accelerator, self.model, self._metrics)
        self._skips_updates = SkipsUpdates(self.accelerator, self.recorder.log)
        if self.numerics == "engine" and rollout_func is not None:
            logger.info("Rollouts are scored by a forward: log-probs of a `rollout_func` are not the engine's.")
        self._add_callbacks()

    def _make_generation(self, **kwargs) -> QaRLVLLMGeneration:
        """Build the engine of the rollouts, in the middle of TRL's constructor, when the policy is prepared."""
        policy = self.policy
        self._check_folder_is_free()
        # On a GPU the engine follows the learner's numerics.
        policy.attach_numerics(self.model)
        generation = QaRLVLLMGeneration(
            **kwargs, options=self.args, dtype=policy.dtype, weight_version=lambda: str(self.state.global_step)
        )
        if self.numerics == "engine":
            [form] = broadcast_object_list([(generation.description.get("arithmetic") or {}).get("cpu_weights")])
            if self.args.vllm_mode == "server" and form is not None:
                # The bits depend on it, and the server has chosen.
                use_cpu_weights(form)
            if self.accelerator.is_main_process:
                policy.check_engine(generation.description)
        return generation

    def _make_generation_config(self, **kwargs) -> OwnGenerationConfig:
        """Return the generation configuration of a learner that generates itself."""
        self.policy.attach_numerics(self.model)
        if self.args.cast_lm_head_to_fp32:
            # TRL casts the inputs, but autocast undoes this in the rollout; TRL's scoring turns autocast off.
            head = self.model.get_output_embeddings()
            head.forward = torch.autocast(self.accelerator.device.type, enabled=False)(head.forward)
        return OwnGenerationConfig(**kwargs)

    def _add_callbacks(self) -> None:
        described = {
            **self.policy.describe(),
            "reward_funcs": self.reward_func_names,
            "num_problems": len(self.train_dataset) if isinstance(self.train_dataset, Sized) else None,
        }
        self.add_callback(self.recorder)
        self.add_callback(self._skips_updates)
        self.add_callback(RunLog(self.args, described))
        self.add_callback(Advisor(self.args.to_dict()))
        show_rows(self.callback_handler)
        if self.args.sync_ref_model:
            # After TRL's callback, which writes to the reference.
            self.add_callback(RefreshReference(self.ref_model))

    @override
    def create_optimizer(self, model=None):
        """Builds Muon with AdamW for `optim="muon"` and `"muon_8bit"`; other names are TRL's. Skips updates without a
        gradient."""
        if self.optimizer is None and self.args.optim in MUONS:
            model = self.model if model is None else model
            self.optimizer = MuonAdamW(
                model,
                set(self.get_decay_parameter_names(model)),
                lr=self.args.learning_rate,
                weight_decay=self.args.weight_decay,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                eps=self.args.adam_epsilon,
                in_8_bits=self.args.optim == "muon_8bit",
            )
        optimizer = super().create_optimizer(model)
        self._skips_updates.watch(optimizer)
        return optimizer

    @override
    def _tokenize_prompts(self, prompts):
        """Builds prompts for vLLM too, which expands placeholders itself; rows without pictures get empty lists."""
        if self.environment_factories is None:
            check_prompts(prompts)
        prompts = open_pictures(prompts)
        counts, num_processes = count_pictures(prompts), self.accelerator.num_processes
        if num_processes > 1 and self.policy.has_pictures and not self._calls_tools:
            counts = gather_object(counts)
        check_rows(counts, self.processing_class, num_processes)
        # Some processors, such as Pixtral's, return tensors by default, which prompts of different lengths are not.
        options = {"processor_kwargs": {"return_tensors": None}} if self._is_vlm else {}
        is_text = isinstance(prompts[0], str)
        with replaced(
            self,
            processing_class=self._tokenizer if is_text else self.processing_class,
            chat_template_kwargs={**options, **self.chat_template_kwargs},
        ):
            prompt_ids, images, fields = super()._tokenize_prompts(prompts)
        placeholders = placeholders_of(self.model, self.processing_class)
        check_tokens(prompt_ids, self._tokenizer, vocabulary_size(self.model), placeholders)
        context = self.vllm_generation.context_length if self.use_vllm else None
        self._longest = warn_of_length(self._longest, prompt_ids, self.model, self.max_completion_length, context)
        images = images and [pictures or [] for pictures in images]
        if self.use_vllm and images is not None:
            raise_problems(problems_of_pictures(self.accelerator.unwrap_model(self.model), self.args))
            options = {"tools": self.tools or None, "chat_template": self.chat_template, **self.chat_template_kwargs}
            messages = [prepare_multimodal_messages(prompt) for prompt in prompts]
            texts = self.processing_class.apply_chat_template(messages, add_generation_prompt=True, **options)
            prompt_ids = expanded_prompts(prompt_ids, texts, self._tokenizer)
        return prompt_ids, images, fields

    @override
    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        """Returns the sampling log-probs too; without vLLM generates under autocast, as in scoring."""
        if self.use_vllm and has_tool_images:
            raise ValueError(
                "A tool has returned a picture, which is unsupported with use_vllm=True: TRL puts the picture's placeholders into "
                "the middle of a completion, where vLLM would expand them again. Return text, or use `use_vllm=False`."
            )
        args = prompt_ids, images, multimodal_fields, num_generations, has_tool_images
        # Between calls of tools each process generates as often as it needs.
        shared = nullcontext() if self._calls_tools else all_or_none(self.accelerator)
        draws_ahead = self._ahead is not None and self.model.training
        drawn = self._ahead.take(prompt_ids) if draws_ahead else None
        with shared, self.recorder.time("rollout"):
            if drawn is not None:
                self._plan = self._plan_scoring(drawn)
                completion_ids, logps = drawn.completion_ids, drawn.logps
            elif self.use_vllm:
                completion_ids, logps = super()._generate_single_turn(*args)
            else:
                model = self.accelerator.unwrap_model(self.model_wrapped)
                recording = record_sampling_logps(model, self.temperature, self.policy.takes_layouts)
                with recording as recorded, quantized_forward(model), self.accelerator.autocast():
                    completion_ids, _ = super()._generate_single_turn(*args)
                logps = recorded[0].cpu().tolist()
                logps = [row[: len(ids)] for row, ids in zip(logps, completion_ids, strict=True)]
        seconds = self.recorder.pop_seconds("rollout") if drawn is None else drawn.seconds
        self.recorder.observe_turn(completion_ids, seconds)
        if draws_ahead:
            epoch, num_skipped, num_before = self._epoch_begun
            place = epoch, num_skipped + self._step - num_before
            self.recorder.log(self._ahead.measure(drawn, self.state.global_step, seconds))
            self._ahead.draw(place, self.state, self._tokenize_prompts)
        return completion_ids, logps

    @override
    def _tool_call_loop(self, *args, **kwargs):
        """Runs TRL's loop; a failure of one process is raised by all."""
        self._calls_tools = True
        try:
            with all_or_none(self.accelerator):
                return super()._tool_call_loop(*args, **kwargs)
        finally:
            self._calls_tools = False

    @override
    def _generate(self, prompts):
        """First waits for the batch drawn ahead and publishes changed weights; then counts loops and garbled text."""
        if self._ahead is not None:
            # Timed separately from the other work on a generation batch.
            with self.recorder.time("wait"):
                self._ahead.collect()
        if self.use_vllm:
            self._publish_what_changed()
        self._plan = self._plan_scoring()
        output = super()._generate(prompts)
        _, completion_ids, _, completions, logps, *_ = output
        self.recorder.observe_completions(completion_ids, completions)
        self._keep_sampled(logps)
        return output

    @override
    def _generate_and_score_completions(self, inputs):
        """Adds the learner's log-probs if TRL has not, and measures mismatch and quantization error."""
        if self.environment_factories is None:
            check_columns(inputs)
        with self.recorder.time("scoring"):
            try:
                output = super()._generate_and_score_completions(inputs)
            except EngineLost as error:
                self._save_before_leaving()
                if self.state.global_step and (folder := last_complete_checkpoint(self.args.output_dir)):
                    error.add_note(f"{folder} is complete: go on from it with `resume_from_checkpoint`.")
                raise
            plan = self._plan
            self._fill_old_logps(output, plan)
            publication = {}
            if self.use_vllm:
                publication = self.vllm_generation.pop_publication()
                publication["rollout/weight_version"] = float(plan.version)
            if self.policy.precision is not None:
                publication["quant/bits"] = float(self.policy.precision)
            self.recorder.observe_rollout(publication)
            if plan.source == "learner":
                self._measure_mismatch(output, plan)
        if plan.source == "learner":
            self.recorder.log({"step/scoring_seconds": self.recorder.pop_seconds("scoring")})
        return output

    @override
    def _calculate_rewards(self, *args, **kwargs):
        """Gathers rewards only once no process has failed; an error of one is raised by all."""
        with all_or_none(self.accelerator), replaced(grpo_trainer, gather=lambda rewards: rewards):
            rewards = super()._calculate_rewards(*args, **kwargs)
        return self.accelerator.gather(rewards)

    def _publish_what_changed(self) -> None:
        """Publish the weights unless the engine has them. TRL looks only at the step, and would miss weights that a
        callback changes within a step."""
        if not self.vllm_generation.is_published():
            with (
                self.recorder.time("publication"),
                all_or_none(self.accelerator),
                profiling_context(self, "sync_weights"),
            ):
                self.vllm_generation.sync_weights()
        # TRL would publish them again.
        self._last_loaded_step = self.state.global_step

    def set_precision(self, precision: int | None) -> None:
        """Set the precision of the policy with [`Policy.set_precision`]; the engine follows at its next rollout."""
        if self.policy.set_precision(precision) and self.use_vllm:
            self.vllm_generation.forget_published()

    @override
    def training_step(self, model, *args, **kwargs):
        """
        Sets the precision of the generation batch that is in progress or begins, by the update at which it began, so a
        resumed run continues unchanged. Measures only forward and backward; TRL's `step_time` includes work done once
        per generation batch.
        """
        options = self.args
        if options.precisions is not None:
            num_updates = options.steps_per_generation * options.num_iterations // options.gradient_accumulation_steps
            num_done = self._step // options.gradient_accumulation_steps % num_updates
            self.set_precision(precision_at(options.precisions, self.state.global_step - num_done, num_updates))
        steps = self.recorder.steps_within(model) if self.is_deepspeed_enabled else nullcontext()
        with self.recorder.time("forward_backward"), steps:
            loss = super().training_step(model, *args, **kwargs)
            self.recorder.synchronize()
        # TRL has closed the step.
        if self._current_train_step_time == 0.0:
            self.recorder.log({"step/forward_backward_seconds": self.recorder.pop_seconds("forward_backward")})
        return loss

    @override
    def _compute_loss(self, model, inputs):
        """Computes TRL's loss, or the objective's own, to which KL and MoE auxiliary loss are added as in TRL."""
        if self.is_deepspeed_enabled and self.model.training:
            forget_order(model)
        if self._objective is None:
            with self._choosing(inputs):
                loss = super()._compute_loss(model, inputs)
            self._measure(inputs, self._forward_logps)
            return loss
        with self._choosing(inputs):
            per_token_logps, entropies, aux_loss = self._score(
                model, inputs, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled
            )
        self._measure(inputs, per_token_logps)
        batch = Batch.of(inputs, per_token_logps)
        loss, per_sequence, kl_ratio = self._objective.loss(self.args, batch)
        mask = batch.mask
        metrics = {"entropy": self.recorder.masked_mean(entropies, mask), **self.recorder.reduce(per_sequence)}
        if self.beta != 0.0:
            correction = 1.0
            if self.args.use_bias_correction_kl:
                if kl_ratio is None:
                    kl_ratio = torch.exp((per_token_logps - batch.old_per_token_logps).masked_fill(mask == 0, 0.0))
                correction = kl_ratio
            # TRL's estimate, averaged over the tokens of each completion and then over completions.
            log_ratio = inputs["ref_per_token_logps"] - per_token_logps
            per_token_kl = (torch.exp(log_ratio) - log_ratio - 1) * correction
            per_sequence_kl = (per_token_kl * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)
            loss = loss + self.beta * per_sequence_kl.mean()
            metrics["kl"] = self.recorder.masked_mean(per_token_kl, mask)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss
            metrics["aux_loss"] = self.accelerator.gather_for_metrics(aux_loss).mean().item()
        self.recorder.log(metrics)
        return loss / (self.current_gradient_accumulation_steps if self.model.training else 1.0)

    @override
    def evaluate(self, *args, **kwargs):
        """Evaluates the policy as it is deployed: at the bits of the scheme. Within a training, random numbers that
        draw completions and shuffle batches continue afterwards as if there had been no evaluation."""
        dataset = kwargs.get("eval_dataset", args[0] if args else None)
        dataset = self.eval_dataset if dataset is None else dataset
        # A text names one of the trainer's datasets.
        if self.environment_factories is None and not isinstance(dataset, str):
            given = [getattr(function, "__wrapped__", function) for function in self.reward_funcs]
            raise_problems(problems_of_evaluation(dataset, given if self.rollout_func is None else []))
        if sharded_by(self.accelerator) in ("FSDP2", "DeepSpeed") and not self._is_prepared:
            raise RuntimeError(f"An evaluation before the training: {_PREPARED_ONCE}")
        self.set_precision(None)
        device = self.accelerator.device
        devices = [] if device.type == "cpu" else [device]
        is_training, logs = self.model.training, self.control.should_log
        with torch.random.fork_rng(devices, enabled=self.is_in_train, device_type=device.type):
            metrics = super().evaluate(*args, **kwargs)
        # A callback may evaluate before the row of an update is logged.
        self.model.train(is_training)
        self.control.should_log = logs
        if not isinstance(dataset, dict) and not any(name.endswith("_loss") for name in metrics):
            # Only its rows tell how many a stream has.
            logger.warning("The evaluation had no rows: nothing was evaluated.")
        return metrics

    @property
    def _is_prepared(self) -> bool:
        """Whether accelerate has sharded the model, or wrapped it for DeepSpeed."""
        return is_sharded(self.model) if self.is_fsdp_enabled else self.model_wrapped is not self.model

    @override
    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs):
        """
        Trains. With `resume_from_checkpoint=True`, resumes from the last complete checkpoint; if that is of the last
        update, the run is loaded and ends. A vLLM server that was started here ends with training, also on SIGTERM.
        The next rollout publishes in any case, as `load_best_model_at_end` may have changed the weights.
        """
        given = self.args.resume_from_checkpoint
        if resume_from_checkpoint is None and resume_option(given) and self.is_world_process_zero():
            logger.warning(
                "A new run begins: resume_from_checkpoint=%r is an option, which `train` does not read, as in transformers. To resume, call "
                "`trainer.train(resume_from_checkpoint=...)`.",
                given,
            )
        if sharded_by(self.accelerator) and self._is_prepared:
            raise RuntimeError(f"A training after another one, or after an evaluation: {_PREPARED_ONCE}")
        self.policy.check_kept()
        restore_signals = exit_on_signals() if self.use_vllm and self.is_world_process_zero() else None
        try:
            with self._hold_folder(resume_from_checkpoint) as checkpoint:
                self._plan = None
                output = super().train(resume_from_checkpoint=checkpoint, **kwargs)
                if self.state.global_step == 0:
                    args = self.args
                    raise RuntimeError(
                        f"The training made no update: no generation batch of {args.generation_batch_size // args.num_generations} prompts was "
                        f"complete (steps_per_generation={args.steps_per_generation}), or a callback ended it. Give the dataset that many rows, "
                        "or lower `steps_per_generation`."
                    )
            return output
        finally:
            if self.use_vllm:
                self.vllm_generation.forget_published()
                if self._ahead is not None:
                    # Its turn will not come.
                    self._ahead.pending = None
                self.vllm_generation.stop_server()
            if restore_signals is not None:
                restore_signals()
            # Training ends at the bits of the scheme.
            self.set_precision(None)


def _without_paths(value: Any) -> Any:
    """Return a model, or reward functions, with names in place of paths, and with lists in place of tuples: TRL takes
    a path, and a tuple, for a model."""
    if isinstance(value, list | tuple):
        return [*map(_without_paths, value)]
    return str(value) if isinstance(value, Path) else value


def _own_ends(args: QaRLConfig, known: list[int]) -> list[int]:
    """Return the tokens at which `generation_kwargs` has completions end, besides the `known` ones. Without them TRL
    would count such completions as truncated."""
    given = args.generation_kwargs or {}
    ends = []
    for name in ("stop_token_ids", "eos_token_id"):
        tokens = given.get(name) or []
        ends += [tokens] if isinstance(tokens, int) else tokens
    return [token for token in dict.fromkeys(ends) if token not in known]
