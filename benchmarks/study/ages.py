"""
Rollouts from the weights of earlier updates, for the section "Older rollouts" of benchmarks/study/README.md. Used by
`long_study.py` for schemes named `...-age1` and so on.

The trainer handles a generation batch as with `rollout_ahead` and keeps the same weights. The learner's own layers
draw each batch when it is due, so nothing but the age differs.
"""

from collections import deque
from types import SimpleNamespace
from typing import Any

from typing_extensions import override

from trl_qarl.quantization.versions import at_version, kept_version
from trl_qarl.rollout.ahead import Ahead, Pending


class Aged(Ahead):
    """
    Makes a trainer without vLLM draw each batch with the weights from `age` generation batches before. The first
    batches use the initial weights.
    """

    def __init__(self, trainer: Any, age: int):
        super().__init__(SimpleNamespace(model=trainer.model, accelerator=trainer.accelerator), trainer.args)
        self.trainer = trainer
        # First update and weights of each of the last batches.
        self.versions: deque = deque(maxlen=age)

    @override
    def take(self, prompt_ids: list[list[int]]) -> Pending | None:
        if not self.versions:
            return None
        version, kept = self.versions[0]
        # Without it, the trainer generates synchronously.
        self.trainer._ahead = None
        try:
            with at_version(self.trainer.model, kept):
                drawn = self.trainer._generate_single_turn(prompt_ids, None, {}, self.args.num_generations)
        finally:
            self.trainer._ahead = self
        return Pending(prompt_ids, version, kept, *drawn)

    @override
    def draw(self, place: tuple[int, int], state: Any, tokenize: Any) -> None:
        self.versions.append((state.global_step, kept_version(self.trainer.model)))
