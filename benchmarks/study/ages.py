"""
Rollouts by weights of earlier updates, for the study of age in benchmarks/study/README.md: `long_study.py` with a
scheme named `...-age1`.

The trainer does with a generation batch what it does with `rollout_ahead`, and keeps the same weights. The learner's
own layers draw it, when its turn comes, so that nothing but the age differs.
"""

from collections import deque
from types import SimpleNamespace
from typing import Any

from typing_extensions import override

from trl_qarl.quantization.versions import at_version, kept_version
from trl_qarl.rollout.ahead import Ahead, Pending


class Aged(Ahead):
    """
    Has a `trainer` that generates by itself draw each batch with the weights that it had `age` generation batches
    before, the first ones with those of the beginning.
    """

    def __init__(self, trainer: Any, age: int):
        super().__init__(SimpleNamespace(model=trainer.model, accelerator=trainer.accelerator), trainer.args)
        self.trainer = trainer
        # The update that each batch began with, and its weights.
        self.versions: deque = deque(maxlen=age)

    @override
    def take(self, prompt_ids: list[list[int]]) -> Pending | None:
        if not self.versions:
            return None
        version = _, kept = self.versions[0]
        # It generates as it does without.
        self.trainer._ahead = None
        try:
            with at_version(self.trainer.model, kept):
                drawn = self.trainer._generate_single_turn(prompt_ids, None, {}, self.args.num_generations)
        finally:
            self.trainer._ahead = self
        self.drawn = Pending(prompt_ids, [version], *drawn)
        return self.drawn

    @override
    def draw(self, place: tuple[int, int], state: Any, tokenize: Any) -> None:
        self.versions.append((state.global_step, kept_version(self.trainer.model)))
