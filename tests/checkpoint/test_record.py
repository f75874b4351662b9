"""The record of a checkpoint: which scheme each layer was trained for."""

import re
from types import SimpleNamespace

import pytest
import torch

from trl_qarl.checkpoint import marker
from trl_qarl.checkpoint.record import check_checkpoint, folder_to_resume, scheme_record, write_scheme
from trl_qarl.quantization.plan import get_plan


ARGS = SimpleNamespace(quantize_learner=True, exclude_modules=("o_proj",))
MAPPING = {"re:.*mlp.*": {"scheme": "w4a16", "group_size": 64}, "re:.*up_proj": "w8a8"}


def record_of(*plan, **edges):
    return scheme_record(ARGS, get_plan(*plan, **edges), torch.bfloat16)


def test_a_checkpoint_is_resumed_by_its_own_plan_alone(tmp_path):
    records = [
        record_of(MAPPING),
        # The first expression that matches counts, so another order is another plan.
        record_of(dict(reversed(MAPPING.items()))),
        record_of("w4a16", 64),
    ]
    assert records[0]["scheme"] == MAPPING
    for written in records:
        marker.begin(tmp_path)
        write_scheme(tmp_path, written)
        marker.complete(tmp_path)
        assert check_checkpoint(str(tmp_path), "", written) == str(tmp_path)
        for other in records:
            if other is not written:
                with pytest.raises(ValueError, match="was trained with"):
                    check_checkpoint(str(tmp_path), "", other)


def test_what_is_no_checkpoint_says_where_one_is(tmp_path):
    for step in (2, 10):
        folder = tmp_path / f"checkpoint-{step}"
        marker.begin(folder)
        marker.complete(folder)
    last = re.escape(str(tmp_path / "checkpoint-10"))
    with pytest.raises(
        ValueError, match=f"is a folder of checkpoints. Resume from {last}, the last complete one in it"
    ):
        folder_to_resume(str(tmp_path), "")
    (tmp_path / "checkpoint-11").mkdir()
    with pytest.raises(ValueError, match=f"incomplete: .*Resume from {last}, the last complete one next to it"):
        folder_to_resume(tmp_path / "checkpoint-11", "")
    with pytest.raises(ValueError, match="resume_from_checkpoint=2 is not a folder"):
        folder_to_resume(2, "")
