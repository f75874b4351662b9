r"""
Trains one cell of the study in benchmarks/study/README.md, in a few minutes on one core: the model of
`benchmarks/study/chain_sums.py` learns to get chains of sums right.

    python benchmarks/study/chain_sums.py --output_dir MODEL
    python benchmarks/study/long_study.py --model MODEL --output_dir DIR --quantize_learner true \
        --objective tbpo --scheme w4a16-g128-signed --seed 0

Rollouts come from the quantized modules, in the same process. `DIR/scores.json` has the final scores of the policy.
`benchmarks/study/cells.py` runs many cells.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from contextlib import contextmanager
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent))

import chain_sums
import decoding


# Options of `QaRLConfig` by the name of a cell's scheme. Groups of 128 are whole rows of most matrices of this model.
VARIANTS = {
    "bf16": {"scheme": "bf16"},
    "w4a16-g128-signed": {"scheme": "w4a16", "group_size": 128},
    "w3a16-g32-signed": {"scheme": "w3a16", "group_size": 32},
}
# The paper's offsets for thousands of tokens, which `--band_scale` multiplies.
BANDS = {"positive_epsilon_high": 4e-4, "negative_epsilon_low": 3e-4, "negative_epsilon_high": 7e-4}
OBJECTIVES = {
    "tbpo": {"loss_type": "tbpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    # GRPO with the mismatch weight of each token truncated at 3, also for rollouts without vLLM.
    "grpo-tis": {"loss_type": "truncated:TruncatedGRPO"},
}
SEQUENCE_CLIP = {"epsilon": 3e-4, "epsilon_high": 4e-4}
OPTIMIZERS = {"adamw": "adamw_torch_fused", "muon": "muon", "muon_8bit": "muon_8bit"}
NUM_UPDATES_PER_BATCH, NUM_GENERATIONS = 8, 8


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(description="Train one cell of the study.")
    add = parser.add_argument
    add("--model", required=True, help="output folder of chain_sums.py")
    add("--output_dir", type=Path, required=True)
    add("--quantize_learner", choices=["true", "false"], default="true")
    add("--objective", choices=list(OBJECTIVES), default="tbpo")
    add("--scheme", choices=list(VARIANTS), default="w4a16-g128-signed")
    add("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    add("--gradient_dtype", choices=["float32", "bfloat16"], default="float32")
    add("--seed", type=int, default=0)
    add("--max_steps", type=int, default=240, help="updates, eight per generation batch; 0 only scores")
    add("--learning_rate", type=float, default=1e-4)
    add("--band_scale", type=float, default=11.0)
    add("--num_prompts", type=int, default=16, help="problems of a generation batch")
    add("--float32", action="store_true", help="train in float32 even where bf16 is fast")
    add("--keep_groups", choices=["true", "false"], help="keep the completions of a problem in one update")
    add("--num_scored", type=int, default=256, help="number of held-out problems to score")
    return parser


def train(args: Namespace) -> None:
    """Train a cell and write its scores."""
    decoding.decode_faster()
    trainer = make_trainer(args)
    if args.max_steps:
        trainer.train()
    trainer.save_model(args.output_dir / "masters")
    scores = score_policies(trainer, args.num_scored)
    (args.output_dir / "scores.json").write_text(json.dumps(scores) + "\n")


def make_trainer(args: Namespace):
    """Return the trainer of a cell."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trl_qarl import QaRLConfig, QaRLTrainer
    from trl_qarl.quantization.gemm import has_fast_bf16

    offsets = {"tbpo": BANDS, "gspo": SEQUENCE_CLIP}.get(args.objective, {})
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    config = QaRLConfig(
        str(args.output_dir),
        **VARIANTS[args.scheme],
        **OBJECTIVES[args.objective],
        **{name: args.band_scale * offset for name, offset in offsets.items()},
        quantize_learner=args.quantize_learner == "true",
        learning_rate=args.learning_rate,
        optim=OPTIMIZERS[args.optimizer],
        gradient_dtype=args.gradient_dtype,
        keep_groups={"true": True, "false": False}.get(args.keep_groups),
        seed=args.seed,
        max_steps=max(args.max_steps, 1),
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=NUM_UPDATES_PER_BATCH,
        adam_beta2=0.95,
        num_generations=NUM_GENERATIONS,
        per_device_train_batch_size=args.num_prompts * NUM_GENERATIONS // NUM_UPDATES_PER_BATCH,
        steps_per_generation=NUM_UPDATES_PER_BATCH,
        max_completion_length=chain_sums.num_new_tokens(chain_sums.chain_steps(model)),
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=has_fast_bf16() and not args.float32,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    training, _ = chain_sums.make_problems(chain_sums.chain_steps(model))
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    data = Dataset.from_list(training)
    return QaRLTrainer(model, chain_sums.right_sum, config, data, processing_class=tokenizer)


def score_policies(trainer, num_scored: int) -> dict[str, dict[str, int]]:
    """
    Return the number of held-out problems solved. The model cannot be trained any more afterwards.

    - `greedy` and `sampled` (temperature 1): the deployed policy, which made the rollouts.
    - `unquantized greedy`: the masters as they are, after a quantized run.
    - `w4a16-g128-signed greedy` and so on: the weights quantized, after a bf16 run and before training.
    """
    import torch

    from trl_qarl import get_scheme, prepare_model
    from trl_qarl.quantization.inventory import Inventory
    from trl_qarl.quantization.swap import (
        disable_quantized_forward,
        quantized_forward,
        restore_model,
    )

    model, bf16 = trainer.model, trainer.args.bf16
    dtype = torch.bfloat16 if bf16 else torch.float32
    problems = chain_sums.make_problems(chain_sums.chain_steps(model))[1][:num_scored]

    @contextmanager
    def engine_precision():
        """While open, tensors that are not quantized are rounded as in an export."""
        masters = {id(weight.parameter) for _, weight in Inventory.of(model).weights()}
        others = [p for p in model.parameters() if id(p) not in masters]
        kept = [p.data for p in others]
        for p in others:
            p.data = p.data.to(dtype).to(p.dtype)
        try:
            yield
        finally:
            for p, data in zip(others, kept, strict=True):
                p.data = data

    def solved(temperature: float) -> dict[str, int]:
        torch.manual_seed(0)
        with engine_precision():
            texts = chain_sums.answer_problems(model, trainer.processing_class, problems, temperature, bf16)
        return {"correct": round(chain_sums.score(texts, problems) * len(problems)), "total": len(problems)}

    with quantized_forward(model):
        scores = {"greedy": solved(0.0), "sampled": solved(1.0)}
    if trainer.args.is_quantized:
        disable_quantized_forward(model)
        return scores | {"unquantized greedy": solved(0.0)}
    for name, options in VARIANTS.items():
        if name != "bf16":
            restore_model(model)
            prepare_model(model, get_scheme(**options), scale_dtype=dtype)
            scores[f"{name} greedy"] = solved(0.0)
    return scores


if __name__ == "__main__":
    train(make_parser().parse_args())
