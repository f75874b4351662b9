r"""
Trains one cell of the study in benchmarks/study/README.md, in a few minutes on one core: the model of
`benchmarks/study/chain_sums.py` learns to get chains of 10 to 15 sums right, in answers of 112 to 172 tokens.

    python benchmarks/study/chain_sums.py --output_dir MODEL
    python benchmarks/study/long_study.py --model MODEL --output_dir DIR --quantize_learner true \
        --objective tbpo --seed 0

Rollouts come from the quantized modules, in the same process. `DIR/scores.json` has the final scores of the policy.
For a mixture (`chain_sums.py --mixture`), `DIR/routes.jsonl` has the experts in use and the routes on which sampler
and learner differ.
"""

import json
import random
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parent))

import ages
import chain_sums
import decoding
import long_starts
import places
import routes
from long_tables import BITS

from trl_qarl.quantization.plan import DEFAULT


def block_by_block(bits: int, fewer: int, blocks: Sequence[int], every: int) -> dict:
    """Return a schedule of `precisions` that begins at `bits` and, every `every` updates, moves one more decoder layer
    of `blocks` to `fewer` bits."""
    patterns = [f"re:.*layers[.]{block}[.].*" for block in blocks]
    stages = {
        count * every: dict.fromkeys(patterns[:count], fewer) | {DEFAULT: bits} for count in range(1, len(patterns))
    }
    return {0: bits, **stages, len(patterns) * every: fewer}


# Options of `QaRLConfig` by the name of a cell's scheme. For most matrices of this model, groups of 128 are whole
# rows. `-observer` schemes have the scales of compressed-tensors, as most of benchmarks/study/README.md.
VARIANTS = {
    "bf16": {"scheme": "bf16"},
    "w4a16-g32": {"scheme": "w4a16-observer", "group_size": 32},
    "w4a16-g128": {"scheme": "w4a16-observer", "group_size": 128},
    "w3a16-g32": {"scheme": "w3a16-observer", "group_size": 32},
    "w3a16-g128": {"scheme": "w3a16-observer", "group_size": 128},
    # Signed scales (benchmarks/study/long_signed.yaml).
    "w4a16-g128-signed": {"scheme": "w4a16", "group_size": 128},
    # Rollouts from the weights of earlier generation batches (benchmarks/study/age.yaml). `age`, `start` and
    # `low_bit_rate` are options of this script: see ages.py, long_starts.py and `speed_up`.
    **{f"w4a16-g128-signed-age{age}": {"scheme": "w4a16", "group_size": 128, "age": age} for age in (1, 2, 4)},
    "w3a16-g32-signed": {"scheme": "w3a16", "group_size": 32},
    "w3a16-g32-signed-distill": {"scheme": "w3a16", "group_size": 32, "start": "distill"},
    # Changes that have helped low-bit learners elsewhere (benchmarks/study/long_variants.yaml).
    "w3a16-g32-decay0": {"scheme": "w3a16-observer", "group_size": 32, "weight_decay": 0.0},
    "w3a16-g32-decay1": {"scheme": "w3a16-observer", "group_size": 32, "weight_decay": 0.1},
    "w3a16-g32-last": {"scheme": "w3a16-observer", "group_size": 32, "exclude_modules": r"model\.layers\.2\..*"},
    "w3a16-g32-first": {"scheme": "w3a16-observer", "group_size": 32, "exclude_modules": r"model\.layers\.0\..*"},
    "w3a16-g32-rate3": {"scheme": "w3a16-observer", "group_size": 32, "low_bit_rate": 3.0},
    "w3a16-g32-mse": {"scheme": "w3a16-observer", "group_size": 32, "start": "mse"},
    "w3a16-g32-gptq": {"scheme": "w3a16-observer", "group_size": 32, "start": "gptq"},
    "w3a16-g32-distill": {"scheme": "w3a16-observer", "group_size": 32, "start": "distill"},
    "w4a16-g128-distill": {"scheme": "w4a16-observer", "group_size": 128, "start": "distill"},
}
# One set of masters in groups of 32 at several precisions (benchmarks/study/bits.yaml). Lists take turns by batch.
NESTED = {
    "nested-4": [4],
    "nested-3": [3],
    "nested-2": [2],
    "nested-43": [4, 3],
    "nested-432": [4, 3, 2],
    "nested-4to3": {0: 4, 120: 3},
    "nested-4to3to2": {0: 4, 80: 3, 160: 2},
    "nested-4to3-forward": block_by_block(4, 3, range(3), every=60),
    "nested-4to3-backward": block_by_block(4, 3, range(2, -1, -1), every=60),
}
WITHOUT_WARM_START = ("nested-4", "nested-4to3", "nested-4to3-forward", "nested-4to3-backward")
VARIANTS |= {
    name + suffix: {"scheme": "w4a16", "group_size": 32, "precisions": precisions} | start
    for suffix, start in {"": {}, "-warm": {"start": "distill"}}.items()
    for name, precisions in NESTED.items()
    if not (suffix and name in WITHOUT_WARM_START)
}
PLAIN = ("w4a16-g32", "w4a16-g128", "w3a16-g32", "w3a16-g128")
NUM_UPDATES_PER_BATCH, NUM_PROMPTS, NUM_GENERATIONS = 8, 16, 8
# The paper's offsets for thousands of tokens, which `--band_scale` multiplies; benchmarks/study/README.md says how the
# factor was chosen.
BANDS = {"positive_epsilon_high": 4e-4, "negative_epsilon_low": 3e-4, "negative_epsilon_high": 7e-4}
SEQUENCE_CLIP = {"epsilon": 3e-4, "epsilon_high": 4e-4}
# Objectives with changed options: the mismatch weight truncated per answer instead of per token, and wider bands.
CHANGED_OBJECTIVES = {
    "grpo-tis-sequence": ("grpo", {"vllm_importance_sampling_mode": "sequence_truncate"}),
    "tbpo-wide": ("tbpo", {name: 3 * offset for name, offset in BANDS.items()}),
}
# TBPO with bands set by hand and with `trust_band="auto"`, at several learning rates
# (benchmarks/study/bands_150.yaml).
OPTIMIZERS = {"adamw": "adamw_torch_fused", "muon": "muon"}
CHANGED_OBJECTIVES |= {
    f"tbpo{band}-{optimizer}-{rate}": ("tbpo", changed | {"optim": name, "learning_rate": float(rate)})
    for band, changed in {
        "": {},
        "-auto": {"trust_band": "auto"},
        "-auto10": {"trust_band": "auto", "trust_band_share": 0.1},
    }.items()
    for optimizer, name in OPTIMIZERS.items()
    for rate in ("3e-5", "1e-4", "3e-4")
}
# TBPO with one thing changed at a time (benchmarks/study/band_controls.py).
CONTROLS = {
    "open": {"opened": list(BANDS)},
    "positive": {"opened": ["negative_epsilon_low", "negative_epsilon_high"]},
    "kept": {"by_kept": True},
}
CHANGED_OBJECTIVES |= {
    f"control-{name}": ("band_controls:Control", {"objective_kwargs": kwargs}) for name, kwargs in CONTROLS.items()
}


def main() -> None:
    parser = ArgumentParser(description=" ".join(__doc__.split("\n\n")[0].split()))
    parser.add_argument("--model", required=True, help="output folder of chain_sums.py")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--quantize_learner", choices=["true", "false"], default="true")
    parser.add_argument("--objective", default="tbpo")
    parser.add_argument("--scheme", choices=list(VARIANTS), default="w4a16-g128")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max_steps", type=int, default=240, help="updates, eight per generation batch")
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--band_scale", type=float, default=30.0)
    parser.add_argument(
        "--error_share", type=float, default=0.0, help="share of completions that get a burst of error tokens"
    )
    parser.add_argument(
        "--errors_known",
        action="store_true",
        help="the engine reports the probabilities that the errors were drawn with, instead of the policy's",
    )
    parser.add_argument("--num_prompts", type=int, default=NUM_PROMPTS, help="problems of a generation batch")
    parser.add_argument("--float32", action="store_true", help="train in float32 even where bf16 is fast")
    parser.add_argument("--places", action="store_true", help="write places.jsonl (benchmarks/study/places.py)")
    parser.add_argument("--num_scored", type=int, default=256, help="number of held-out problems to score")
    args = parser.parse_args()
    train(args)


def train(args: Namespace) -> None:
    decoding.decode_faster()
    trainer = make_trainer(args)
    if args.error_share:
        inject_errors(trainer.model, args.error_share, args.seed, known=args.errors_known)
    if args.max_steps:
        if hasattr(trainer.model.config, "num_experts"):
            (args.output_dir / routes.ROUTES_FILE).unlink(missing_ok=True)
            routes.RouteRecorder(trainer, args.output_dir / routes.ROUTES_FILE)
        if args.places:
            (args.output_dir / places.PLACES_FILE).unlink(missing_ok=True)
            places.PlaceRecorder(trainer, args.output_dir / places.PLACES_FILE)
        trainer.train()
        # Recorded so that a report does not merge runs that differ in errors, start, rate or age.
        record = args.output_dir / "run.json"
        own = {"error_share": args.error_share} | ({"errors_known": True} if args.errors_known else {})
        variant = VARIANTS[args.scheme]
        own |= {name: variant[name] for name in ("start", "low_bit_rate", "age") if name in variant}
        record.write_text(json.dumps(json.loads(record.read_text()) | own, indent=2))
    trainer.save_model(args.output_dir / "masters")
    # Score the policy without the injected errors.
    vars(trainer.model).pop("generate", None)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    if not args.max_steps and args.scheme == "bf16":
        plain = {name: VARIANTS[name] for name in PLAIN}
        problems = held_out(trainer.model, args.num_scored)
        divergences = long_starts.measure_divergence(trainer, plain, problems)
        (args.output_dir / "divergences.json").write_text(json.dumps(divergences) + "\n")
    (args.output_dir / "scores.json").write_text(
        json.dumps(score_policies(trainer, args.num_scored, deployed_bits(args.scheme))) + "\n"
    )


def make_trainer(args: Namespace, **more):
    """Return the trainer of a cell, with `more` options of `QaRLConfig`."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trl_qarl import QaRLConfig, QaRLTrainer
    from trl_qarl.quantization.gemm import has_fast_bf16

    objective, changed = CHANGED_OBJECTIVES.get(args.objective, (args.objective, {}))
    offsets = (
        BANDS
        if objective in ("tbpo", "band_controls:Control")
        else SEQUENCE_CLIP
        if objective.endswith("gspo")
        else {}
    )
    if "trust_band" in changed:
        offsets = {}
    options = {"learning_rate": args.learning_rate, "optim": OPTIMIZERS["adamw"]}
    options |= {**offsets, **changed, **VARIANTS[args.scheme]}
    options |= {name: args.band_scale * options[name] for name in offsets}
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    start, rate, age = (options.pop(name, None) for name in ("start", "low_bit_rate", "age"))
    if isinstance(options.get("precisions"), dict):
        # Drop the stages that a shorter run does not reach.
        reached = {update: bits for update, bits in options["precisions"].items() if update < max(args.max_steps, 1)}
        options["precisions"] = reached
    config = QaRLConfig(
        str(args.output_dir),
        **options,
        **more,
        quantize_learner=args.quantize_learner == "true",
        objective=objective,
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
    if start == "distill":
        precisions = list(BITS) if "precisions" in options else None
        long_starts.distill(model, options["scheme"], options["group_size"], args.seed, config.bf16, precisions)
    training, _ = chain_sums.make_problems(chain_sums.chain_steps(model))
    trainer = QaRLTrainer(
        model,
        chain_sums.right_sum,
        config,
        Dataset.from_list(training),
        processing_class=AutoTokenizer.from_pretrained(args.model),
    )
    if start in ("mse", "gptq"):
        long_starts.improve_start(trainer, start)
    if age:
        trainer._ahead = ages.Aged(trainer, age)
    if rate:
        trainer.create_optimizer()
        speed_up(trainer.optimizer, trainer.model, rate)
    return trainer


def held_out(model, number: int) -> list[dict[str, str]]:
    """Return held-out problems with chains as long as in the model's pretraining."""
    return chain_sums.make_problems(chain_sums.chain_steps(model))[1][:number]


def speed_up(optimizer, model, rate: float) -> None:
    """Give the master weights of quantized layers `rate` times the learning rate of the others."""
    from trl_qarl.quantization.swap import quantized_layers

    low_bit = {id(layer.weight) for layer in quantized_layers(model).values()}
    for group in list(optimizer.param_groups):
        fast = [parameter for parameter in group["params"] if id(parameter) in low_bit]
        if fast:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in low_bit]
            optimizer.add_param_group({**group, "params": fast, "lr": rate * group["lr"]})


def deployed_bits(variant: str) -> int | None:
    """Return the bits at which masters are deployed: the smallest of a list or schedule, None without `precisions`."""
    from trl_qarl.quantization.precisions import bits_of

    precisions = VARIANTS[variant].get("precisions")
    return precisions and bits_of(precisions)[-1]


def score_policies(trainer, num_scored: int, deployed: int | None = None) -> dict[str, dict[str, int]]:
    """
    Return the number of held-out problems solved. The model cannot be trained any more afterwards.

    - `greedy` and `sampled` (temperature 1): the deployed policy, which made the rollouts. With several precisions,
      the policy at `deployed` bits, the fewest.
    - `3 bits greedy` and so on: the same masters at each of `BITS`, with several precisions only.
    - `unquantized greedy`: the masters as they are, after a quantized run.
    - `w4a16-g32 greedy` and so on: the weights quantized, after a bf16 run and before training.
    """
    import torch

    from trl_qarl import get_scheme, prepare_model
    from trl_qarl.quantization.swap import (
        disable_quantized_forward,
        engine_precision,
        quantized_forward,
        restore_model,
    )

    model, bf16 = trainer.model, trainer.args.bf16
    dtype = torch.bfloat16 if bf16 else torch.float32
    problems = held_out(model, num_scored)

    def solved(temperature: float) -> dict[str, int]:
        torch.manual_seed(0)
        with engine_precision(model, dtype):
            texts = chain_sums.answer_problems(model, trainer.processing_class, problems, temperature, bf16)
        return {"correct": round(chain_sums.score(texts, problems) * len(problems)), "total": len(problems)}

    scores = {}
    with quantized_forward(model):
        for bits in [None] if deployed is None else BITS:
            trainer.set_precision(bits)
            found = {"greedy": solved(0.0), "sampled": solved(1.0)}
            scores |= found if bits == deployed else {}
            scores |= {} if bits is None else {f"{bits} bits {name}": score for name, score in found.items()}
    if trainer.args.is_quantized:
        disable_quantized_forward(model)
        return scores | {"unquantized greedy": solved(0.0)}
    for name in PLAIN:
        restore_model(model)
        prepare_model(model, get_scheme(**VARIANTS[name]), scale_dtype=dtype)
        scores[f"{name} greedy"] = solved(0.0)
    return scores


def inject_errors(model, share: float, seed: int, length: int = 8, last_start: int = 90, known: bool = False) -> None:
    """
    Simulate a faulty engine: in a `share` of the completions, `length` tokens from a random position below
    `last_start` on are drawn uniformly from the characters.

    By default the sampling log-probs remain the policy's, under which such tokens are improbable: the paper's error
    tokens, improbable to learner and sampler. With `known` they are those of the uniform draw, as from a noisy engine
    that reports what it did: improbable only to the learner, a large mismatch.
    """
    import torch
    from transformers import LogitsProcessor

    generate, rng = model.generate, random.Random(seed)
    first, last = 2, 2 + len(chain_sums.CHARACTERS)

    class Bursts(LogitsProcessor):
        def __init__(self):
            self.starts: list[int] | None = None
            self.step = 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if self.starts is None:
                size = len(input_ids)
                self.starts = [rng.randrange(last_start) if rng.random() < share else -length for _ in range(size)]
            faulty = torch.tensor([start <= self.step < start + length for start in self.starts])
            self.step += 1
            if not faulty.any():
                return scores
            scores = scores.clone()
            scores[faulty] = float("-inf")
            scores[faulty, first:last] = 0.0
            return scores

    def generate_with_errors(*args, logits_processor, **kwargs):
        # The list already has the recorder of sampling log-probs, which sees the processors before it.
        logits_processor.insert(0 if known else len(logits_processor), Bursts())
        return generate(*args, logits_processor=logits_processor, **kwargs)

    model.generate = generate_with_errors


if __name__ == "__main__":
    main()
