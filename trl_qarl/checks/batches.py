"""Compares the training dataset with a generation batch: TRL drops an incomplete one, and would train nothing."""

import logging
from collections.abc import Iterator
from typing import Any

from datasets import Dataset, IterableDataset


logger = logging.getLogger(__name__)


def problems_of_dataset(dataset: Any) -> Iterator[str]:
    """Yield a problem of a training dataset that is of another class, or empty."""
    kind = type(dataset).__name__
    if isinstance(dataset, dict) and not any(isinstance(each, Dataset | IterableDataset) for each in dataset.values()):
        yield f"`train_dataset` is a dictionary with {[*dataset]}. `Dataset.from_dict(columns)` makes a dataset of columns."
    elif isinstance(dataset, dict):
        split = "train" if "train" in dataset else next(iter(dataset), "train")
        yield f"`train_dataset` is a {kind} with the splits {[*dataset]}. Give `train_dataset=dataset[{split!r}]`."
    elif dataset is not None and not isinstance(dataset, Dataset | IterableDataset):
        yield f"`train_dataset` is of type {kind}, and must be a `datasets.Dataset` or `IterableDataset`."
    elif isinstance(dataset, Dataset) and not len(dataset):
        yield "The training dataset has no rows. Give at least the prompts of one generation batch."


def fit_generation_batch(args: Any, dataset: Any) -> Iterator[str]:
    """
    Lower our default of `steps_per_generation` in `args` to a generation batch that `dataset` can fill, and log how
    many prompts are left over. Yield a problem if there is no such batch, or if the user's is too large.
    """
    if args.generation_batch_size != _completions(args, args.steps_per_generation):
        yield (
            f"generation_batch_size={args.generation_batch_size} does not fit per_device_train_batch_size={args.per_device_train_batch_size} and "
            f"steps_per_generation={args.steps_per_generation}: an option of the configuration was set after it was made. Give it to `QaRLConfig(...)`."
        )
    if isinstance(dataset, IterableDataset) and args.max_steps <= 0:
        yield f"max_steps={args.max_steps} with a streamed dataset, which does not tell how many rows it has. Give `max_steps`."
    if not isinstance(dataset, Dataset) or not len(dataset):
        return
    num_prompts, largest = len(dataset), args.steps_per_generation
    candidates = [largest]
    if args.chooses_steps:
        accumulation = args.gradient_accumulation_steps
        candidates = [number * accumulation for number in range(8, 0, -1)]
        if args.precisions is None:
            candidates += [number for number in range(accumulation - 1, 0, -1) if accumulation % number == 0]
        largest = candidates[0]
    fitting = [steps for steps in candidates if 0 < _prompts(args, steps) <= num_prompts]
    if not fitting:
        yield _explain(args, num_prompts)
        return
    steps = fitting[0]
    if args.chooses_steps:
        args.steps_per_generation, args.generation_batch_size = steps, _completions(args, steps)
    size, said = _prompts(args, steps), []
    if steps < largest:
        text = f"steps_per_generation={steps} in place of the default {largest}: the dataset has {num_prompts} prompts"
        said.append(f"{text}, and that needs {_completions(args, largest) // args.num_generations}.")
    if rest := num_prompts % size:
        said.append(f"{rest} of {num_prompts} prompts are left over in each epoch: a generation batch has {size}.")
    if said and args.process_index == 0:
        logger.warning(" ".join(said))


def _completions(args: Any, steps: int) -> int:
    return args.per_device_train_batch_size * args.world_size * steps


def _prompts(args: Any, steps: int) -> int:
    """Return the number of prompts in a generation batch, 0 if it is not whole."""
    number, rest = divmod(_completions(args, steps), args.num_generations)
    return 0 if rest else number


def _explain(args: Any, num_prompts: int) -> str:
    given = args.steps_per_generation
    name = (
        "the smallest generation batch"
        if args.chooses_steps
        else f"steps_per_generation={given} (generation_batch_size={args.generation_batch_size})"
    )
    steps = [steps for steps in range(1, given + 1) if _prompts(args, steps)]
    needs = _prompts(args, steps[0] if args.chooses_steps else given)
    possible = [steps for steps in steps if _prompts(args, steps) <= num_prompts]
    fix = f"Give steps_per_generation={possible[-1]} at most" if possible else "Lower `per_device_train_batch_size`"
    sizes = f"per_device_train_batch_size={args.per_device_train_batch_size}, {args.world_size} processes"
    return (
        f"The training dataset has {num_prompts} prompt{'s' if num_prompts > 1 else ''}, and {name} needs {needs} ({sizes}, "
        f"num_generations={args.num_generations}): nothing would be trained. {fix}, or add prompts."
    )
