"""
Rollouts that a server draws while the learner trains on the previous ones.

    batch      t-1              t                t+1
    learner    train ------>|   train ------>|   train ------>
    engine     draw t ----->|   draw t+1 --->|   draw t+2 --->
                            ^
                            wait for t, publish the weights, ask for t+1

Between two generation batches nothing is in flight: the learner waits for the engine, publishes, and has a thread
request the completions of the next batch. docs/vllm.md explains the consequences.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accelerate.utils import gather_object

from ..engines.background import BackgroundCall
from ..quantization.versions import KeptVersion, at_version, kept_version
from .failures import EngineLost, all_or_none


logger = logging.getLogger(__name__)


@dataclass
class Pending:
    """A generation batch of this process that is drawn before its turn, by the `weights` of the update `version`.
    Completions and log-probs are there once they have arrived; only the main process knows the engine's `seconds`."""

    prompt_ids: list[list[int]]
    version: int
    weights: KeptVersion
    completion_ids: list[list[int]] | None = None
    logps: list[list[float | None]] | None = None
    seconds: float = 0.0
    in_flight: BackgroundCall | None = None

    def keep(self, output: tuple) -> None:
        """Store the result of [`~trl_qarl.rollout.generation.QaRLVLLMGeneration.generate`]."""
        _, self.completion_ids, logps, _ = output
        self.logps = [[values[0] for values in row] for row in logps]
        self.in_flight = None


class NextPrompts:
    """
    Prompts of generation batches that have not begun, from a separate `sampler` with the seed of the training's. The
    loader itself must not be read ahead: it marks the end of its data, after which accelerate cuts gathered tensors.
    It repeats a batch for `num_repeats` micro-batches; an update has `accumulation` of them.
    """

    def __init__(
        self, sampler: Any, dataset: Any, num_repeats: int, accumulation: int, num_processes: int, process_index: int
    ):
        self._sampler, self._dataset = sampler, dataset
        self._num_repeats, self._accumulation = num_repeats, accumulation
        self._num_processes, self._process_index = num_processes, process_index
        self._sampler.repeat_count = 1
        self._num_drawn, self._order = 0, []
        self._per_epoch = sampler.num_samples // sampler.batch_size

    def number_at(self, epoch: int, micro_batch: int) -> int:
        """Return the number, counted from the first epoch, of the generation batch of a micro-batch."""
        return epoch * self._per_epoch + micro_batch // self._num_repeats

    def prompts(self, number: int) -> list[Any]:
        """Return this process' prompts of a generation batch; its epoch must not be before the last one asked for."""
        epoch, place = divmod(number, self._per_epoch)
        while self._num_drawn <= epoch:
            self._order = list(self._sampler)
            self._num_drawn += 1
        size = len(self._order) // self._per_epoch
        share = size // self._num_processes
        start = place * size + self._process_index * share
        return [self._dataset[index]["prompt"] for index in self._order[start : start + share]]

    def updates_before(self, number: int) -> int:
        """Return the number of updates before a generation batch."""
        # The last update of an epoch may have fewer micro-batches.
        epoch, place = divmod(number, self._per_epoch)
        per_epoch = -(-self._per_epoch * self._num_repeats // self._accumulation)
        return epoch * per_epoch + place * self._num_repeats // self._accumulation


class Prefetcher:
    """
    The generation batch that `generation`, a [`~trl_qarl.rollout.generation.QaRLVLLMGeneration`] with a server, draws
    before its turn, `pending`, and the weights that draw it. All processes have to make the same calls.
    """

    def __init__(self, generation: Any, args: Any):
        self.generation, self.args = generation, args
        self.pending: Pending | None = None
        self._coming: NextPrompts | None = None
        self._wait_seconds = 0.0

    def begin(self, sampler: Any, dataset: Any) -> None:
        """Begin or continue a training on `dataset`; its prompts come in the order of `sampler`, which nothing else
        may use."""
        args, accelerator = self.args, self.generation.accelerator
        num_repeats = args.steps_per_generation * args.num_iterations
        processes = accelerator.num_processes, accelerator.process_index
        self._coming = NextPrompts(sampler, dataset, num_repeats, args.gradient_accumulation_steps, *processes)

    def wait(self) -> None:
        """Wait for the request in flight. A failed batch stays pending."""
        batch = self.pending
        if batch is None or batch.in_flight is None:
            return
        start, in_flight = time.perf_counter(), batch.in_flight
        try:
            batch.keep(self.generation.collect(in_flight, batch.prompt_ids, self.args.num_generations))
        except EngineLost as lost:
            batch.in_flight = None
            logger.warning("A generation batch was lost while it was drawn ahead: %s", lost)
        batch.seconds = in_flight.seconds
        self._wait_seconds += time.perf_counter() - start

    def collect(self) -> None:
        """Wait for the request in flight. A lost batch is drawn again with the weights that were to draw it, which are
        published for it. [`EngineLost`] is raised on every process if the engine cannot be brought back."""
        self.wait()
        batch = self.pending
        if batch is None or batch.completion_ids is not None:
            return
        start = time.perf_counter()
        with at_version(self.generation.model, batch.weights):
            self.generation.sync_weights()
            batch.keep(self.generation.generate(batch.prompt_ids, None, self.args.num_generations))
        # The engine no longer has the learner's weights.
        self.generation.forget_published()
        batch.seconds = time.perf_counter() - start
        self._wait_seconds += batch.seconds

    def take(self, prompt_ids: list[list[int]]) -> Pending | None:
        """Return the pending batch, whose turn it is, if it was drawn from these prompts; others drop it."""
        batch, self.pending = self.pending, None
        if batch is not None and not all(gather_object([batch.prompt_ids == prompt_ids])):
            logger.warning(
                "The prompts are not those that were drawn ahead: something other than `seed` orders them. They are drawn now, and "
                "the batch that was drawn ahead is dropped."
            )
            return None
        return batch

    def measure(self, drawn: Pending | None, now: int, seconds: float) -> dict[str, float]:
        """Return metrics of a batch, `drawn` before its turn or now, which begins at update `now` and took the engine
        `seconds`."""
        waited, self._wait_seconds = self._wait_seconds, 0.0
        return {
            "rollout/age_updates": 0.0 if drawn is None else float(now - drawn.version),
            "rollout/engine_seconds": seconds,
            "rollout/wait_seconds": waited + (seconds if drawn is None else 0.0),
        }

    def draw(self, place: tuple[int, int], state: Any, tokenize: Callable[[list], tuple]) -> None:
        """
        Have the engine, which holds the learner's weights, draw the next batch, unless the training ends before it,
        and keep these weights. `place` is the epoch and its next micro-batch; `state` has the update whose weights the
        learner has, and the last update; `tokenize` turns prompts into token ids and pictures.
        """
        number = self._coming.number_at(*place) + 1
        if self._coming.updates_before(number) >= state.max_steps:
            return
        # An error in one process' prompts must not leave the others waiting.
        with all_or_none(self.generation.accelerator):
            prompt_ids, images, _ = tokenize(self._coming.prompts(number))
            if images is not None:
                raise ValueError("rollout_ahead=1 is unsupported with pictures. Remove it.")
        weights = kept_version(self.generation.model)
        launched = self.generation.launch(prompt_ids, self.args.num_generations)
        self.pending = Pending(prompt_ids, state.global_step, weights, in_flight=launched)

    def state(self) -> tuple[tuple | None, dict[str, Any] | None]:
        """Return this process' pending batch in a form for files, and the weights that draw it: a shard if the model
        is sharded, else the same on all processes. Both are `None` if there is no batch."""
        self.wait()
        batch = self.pending
        if batch is None:
            return None, None
        drawn = batch.completion_ids, batch.logps, batch.seconds
        return (batch.prompt_ids, batch.version, *drawn), batch.weights.state()

    def load(self, batch: tuple | None, weights: dict[str, Any] | None) -> None:
        """Continue from [`~Prefetcher.state`]."""
        self.pending = None
        if batch is not None:
            prompt_ids, version, *drawn = batch
            kept = KeptVersion.of_state(weights, self.generation.model)
            self.pending = Pending(prompt_ids, version, kept, *drawn)
