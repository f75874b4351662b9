"""Errors and warnings where engine and learner give a token different log-probs."""

from types import SimpleNamespace

import pytest
import torch

from trl_qarl.bitwise.exact import Exactness
from trl_qarl.forward import Batch


ACCELERATOR = SimpleNamespace(
    device=torch.device("cpu"), gather=lambda tensor: tensor, unwrap_model=lambda model: model
)


def make_output(difference=0.0):
    old = torch.full((2, 3), -1.0)
    sampling = old.clone()
    sampling[1, 2] += difference
    return {
        "prompt_ids": torch.ones(2, 1, dtype=torch.long),
        "prompt_mask": torch.ones(2, 1),
        "completion_ids": torch.arange(6).view(2, 3),
        "completion_mask": torch.ones(2, 3),
        "advantages": torch.ones(2),
        "old_per_token_logps": old,
        "sampling_per_token_logps": sampling,
    }


def check(exactness, output, accelerator=ACCELERATOR):
    exactness.check(output, Batch.of(output), torch.nn.Linear(1, 1), accelerator)


@pytest.mark.parametrize(
    ("difference", "where"), [(0.0, "it is on another process"), (-0.5, r"token 2 of completion 1 \(id 5\) log-probs")]
)
def test_a_process_names_only_its_own_difference(difference, where):
    together = SimpleNamespace(
        **vars(ACCELERATOR) | {"gather": lambda tensor: torch.cat([tensor, torch.tensor([0.5])])}
    )
    with pytest.raises(RuntimeError, match=f"mismatch is 0.5 and not 0: .*{where}"):
        check(Exactness(is_required=True), make_output(difference), together)


def test_the_first_difference_is_logged(caplog):
    exactness = Exactness(is_required=False)
    for difference in (0.0, 1e-6, 0.0, float("nan")):
        check(exactness, make_output(difference))
    assert len(caplog.records) == 1 and exactness.has_differed


def test_tokens_that_do_not_count_are_not_compared():
    output = make_output(1.0)
    output["tool_mask"] = torch.ones(2, 3)
    output["tool_mask"][1, 2] = 0
    check(Exactness(is_required=True), output)
