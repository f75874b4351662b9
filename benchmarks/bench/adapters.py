"""
`python -m benchmarks.bench adapter`: LoRA beside the low-bit weights and in them against training of all weights.

A [`~trl_qarl.QaRLTrainer`] trains each on the same prompts, with rollouts by vLLM in the same process or by the
learner. What is reported is from its own log, after the first generation batch: before that the adapter is zero, and
the engine gets the base.
"""

import gc
import statistics
import tempfile
from collections.abc import Iterable
from typing import Any

from trl_qarl.options import CHOICES


TRAINED = ("all", *CHOICES["lora_mode"])
"""What can be trained: all weights, or an adapter."""

# What benchmarks/study/lora.yaml and the quickstart train with.
_RATES = {"all": 1e-5, "adapter": 3e-4, "merged": 3e-4}
_UPDATES = 2


def measure_adapters(path: str, prompts: list[list[dict[str, str]]], schemes: list[str], args) -> list[dict[str, Any]]:
    """
    One row per dtype, scheme and what is trained: mismatch per token, what an update sends and how long that takes,
    memory.

    Args:
        path (`str`):
            Folder of the model.
        prompts (`list[list[dict[str, str]]]`):
            Conversations to answer, 4 completions each.
        schemes (`list[str]`):
            Schemes to train with.
        args (`Namespace`):
            `dtypes`, `trained` (of [`TRAINED`]), `rollout` (`"colocate"` or `"transformers"`), `tokens` (the first is
            the number of sequences per generation batch), `new_tokens`, `repeats` (generation batches that are
            measured) and `lora_r`.
    """
    rows = []
    for dtype in args.dtypes:
        for scheme in schemes:
            for trained in args.trained:
                rows.append(
                    {"dtype": dtype, "scheme": scheme, "trained": trained}
                    | _run(path, prompts, scheme, dtype, trained, args)
                )
                print(rows[-1], flush=True)
    return rows


def _run(path: str, prompts, scheme: str, dtype: str, trained: str, args) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import PrinterCallback, ProgressCallback

    from trl_qarl.trainer.qarl_config import QaRLConfig
    from trl_qarl.trainer.qarl_trainer import QaRLTrainer

    peft_config, options, use_vllm = None, {}, args.rollout == "colocate"
    if trained != "all":
        from peft import LoraConfig

        peft_config = LoraConfig(
            r=args.lora_r, lora_alpha=2 * args.lora_r, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        options["lora_mode"] = trained
    with tempfile.TemporaryDirectory() as folder:
        config = QaRLConfig(
            folder,
            scheme=scheme,
            **options,
            numerics="fast",
            # Drops no sequence, so that every update moves the weights.
            loss_type="grpo",
            use_cpu=True,
            bf16=dtype == "bfloat16",
            num_generations=4,
            per_device_train_batch_size=args.tokens[0] // _UPDATES,
            steps_per_generation=_UPDATES,
            max_completion_length=args.new_tokens,
            max_steps=_UPDATES * (args.repeats + 1),
            learning_rate=_RATES[trained],
            optim="adamw_torch_fused",
            gradient_checkpointing=False,
            use_vllm=use_vllm,
            vllm_mode="colocate",
            vllm_max_model_length=512 if use_vllm else None,
            generation_kwargs={"ignore_eos": True} if use_vllm else None,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            dataloader_pin_memory=False,
        )
        dataset = Dataset.from_dict({"prompt": prompts})
        trainer = QaRLTrainer(path, _variety, config, dataset, peft_config=peft_config)
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        memory = _make_memory()()
        trainer.add_callback(memory)
        trainer.train()
        log = trainer.state.log_history
        if use_vllm:
            trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()
        del trainer
        # vLLM exempts what was there when an engine started from collection, and the next trainer needs the memory.
        gc.unfreeze()
        gc.collect()

        def values(name: str) -> list[float]:
            # One for each generation batch, the first left out.
            return [row[name] for row in log if name in row][1:]

        sent = {
            "sent MiB": "publish/megabytes",
            "tensors sent": "publish/tensors",
            "publish s": "publish/seconds",
        }
        return {
            "sequences": args.repeats * args.tokens[0],
            "mean": statistics.fmean(values("mismatch/abs_logp_mean")),
            "max": max(values("mismatch/abs_logp_max")),
            **{name: statistics.median(values(metric)) for name, metric in sent.items() if use_vllm},
            "weights MiB": memory.weights / 2**20,
            "with gradients and optimizer MiB": memory.training / 2**20,
        }


def _variety(completions, completion_ids, **kwargs) -> list[float]:
    return [float(len(set(ids))) for ids in completion_ids]


def held_bytes(model, optimizer=None) -> int:
    """
    Bytes of the tensors that training of `model` holds: parameters, buffers and the low-bit weights made of masters;
    with `optimizer` gradients and its state, too. Activations are not among them.
    """
    from trl_qarl.quantization.swap import quantized_layers

    made = [layer.low_bit_weight() for layer in quantized_layers(model).values() if not layer.is_frozen]
    tensors = [*model.parameters(), *model.buffers(), *made]
    if optimizer is not None:
        tensors += [p.grad for p in model.parameters() if p.grad is not None]
        tensors += [
            value for state in optimizer.state.values() for value in state.values() if hasattr(value, "nbytes")
        ]
    return _sum_bytes(tensors)


def _sum_bytes(tensors: Iterable[Any]) -> int:
    # Tied weights are one parameter, and `parameters()` gives it once.
    parts = (tensor.parts() if hasattr(tensor, "parts") else [tensor] for tensor in tensors)
    return sum(part.nbytes for of_one in parts for part in of_one)


def _make_memory():
    """A class, because transformers is imported late."""
    from transformers import TrainerCallback

    class Memory(TrainerCallback):
        """What is held when the optimizer has stepped and gradients are still there."""

        weights = training = 0

        def on_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
            self.weights, self.training = held_bytes(model), held_bytes(model, optimizer)

    return Memory
