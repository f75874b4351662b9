r"""
Train the low-bit policy of a model towards the model itself, before reinforcement learning: rounding to nearest costs
a small model, or one in few bits, a good part of what it can do, and a few dozen updates bring most of it back
(docs/objectives.md).

    python examples/warm_start.py --model Qwen/Qwen3-0.6B-Base --dataset trl-lib/DeepMath-103K --scheme w4a16 \
        --output_dir warm

TRL's DistillationTrainer does the work: the low-bit policy answers prompts, and at each of its tokens the divergence
to the model before quantization is made smaller. `warm` has high-precision masters, to be given to QaRLTrainer as its
`model`. With `--precisions '[4, 3, 2]'` its updates take turns at these bits, as the `precisions` of QaRLConfig do
(docs/schemes.md).
"""

from argparse import ArgumentParser

import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DistillationConfig, DistillationTrainer

from trl_qarl import QuantScheme, get_scheme, prepare_model, restore_model
from trl_qarl.quantization.precisions import (
    parse_precisions,
    precision_at,
    problems_of_precisions,
    set_precision,
)
from trl_qarl.quantization.swap import quantized_layers


def main() -> None:
    parser = ArgumentParser(description=" ".join(__doc__.split("\n\n")[0].split()))
    parser.add_argument("--model", required=True)
    parser.add_argument("--dataset", required=True, help="with a column `prompt`; its answers are not used")
    parser.add_argument("--scheme", default="w4a16")
    parser.add_argument("--group_size", type=int)
    parser.add_argument("--precisions", type=parse_precisions, help="bits in turn, '[4, 3]', or from an update on")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--max_steps", type=int, default=40)
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--max_completion_length", type=int, default=512)
    args = parser.parse_args()
    student, teacher = (AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32) for _ in range(2))
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    config = DistillationConfig(
        args.output_dir,
        max_steps=args.max_steps,
        learning_rate=args.learning_rate,
        per_device_train_batch_size=args.batch_size,
        max_completion_length=args.max_completion_length,
        use_cpu=not torch.accelerator.is_available(),
        logging_steps=1,
        save_strategy="no",
    )
    scheme = get_scheme(args.scheme, group_size=args.group_size)
    prompts = load_dataset(args.dataset, split="train")
    warm_start(student, teacher, scheme, prompts, tokenizer, config, args.precisions)
    student.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)


def warm_start(
    student,
    teacher,
    scheme: QuantScheme,
    prompts: Dataset,
    tokenizer,
    config: DistillationConfig,
    precisions: list[int] | dict[int, int] | None = None,
) -> None:
    """
    Change the weights of `student`, which has high-precision masters before and after.

    Args:
        student, teacher (`PreTrainedModel`): two copies of one model.
        scheme ([`QuantScheme`]): what `student` is to be rounded to.
        prompts (`Dataset`): with a column `prompt`.
        tokenizer (`PreTrainedTokenizerBase`): with `padding_side="left"`.
        config (`DistillationConfig`): number of updates, learning rate, batch and length.
        precisions (`list[int]` or `dict[int, int]`, *optional*): bits of one update after the other, in turn, or from
            an update on.

    Raises:
        ValueError: if `scheme` does not have one of `precisions`.
    """
    report = prepare_model(student, scheme, scale_dtype=torch.bfloat16 if config.bf16 else torch.float32)
    callbacks = []
    if precisions is not None:
        for problem in problems_of_precisions(precisions, report.plan, config.max_steps):
            raise ValueError(problem)
        callbacks.append(InTurn(precisions, report.schemes))
    DistillationTrainer(
        student, teacher, config, train_dataset=prompts, processing_class=tokenizer, callbacks=callbacks
    ).train()
    restore_model(student)


class InTurn(TrainerCallback):
    """Has the layers of `schemes` quantize their masters at the bits of the update that begins: its answers and its
    gradient."""

    def __init__(self, precisions: list[int] | dict[int, int], schemes: dict[str, QuantScheme]):
        self.precisions, self.schemes = precisions, schemes

    def on_step_begin(self, args, state, control, model, **kwargs):
        """Comes before the answers of the update are generated."""
        set_precision(quantized_layers(model), self.schemes, precision_at(self.precisions, state.global_step, 1))


if __name__ == "__main__":
    main()
