"""The record of a checkpoint: which scheme each layer was trained for."""

import json
from types import SimpleNamespace

import pytest
import torch

from trl_qarl.checkpoint import marker
from trl_qarl.checkpoint.record import find_checkpoint, scheme_record, write_scheme
from trl_qarl.quantization.plan import get_plan


ARGS = SimpleNamespace(quantize_learner=True, exclude_modules=("o_proj",))
MAPPING = {"re:.*mlp.*": {"scheme": "w4a16", "group_size": 64}, "re:.*up_proj": "w8a8"}


def complete(folder):
    marker.begin(folder)
    marker.complete(folder)


def record_of(*plan, **edges):
    return scheme_record(ARGS, get_plan(*plan, **edges), torch.bfloat16)


def test_record_of_one_scheme_names_it_and_its_grid(tmp_path):
    record = record_of("w4a16", 64)
    assert record == {
        "scheme": "w4a16",
        "grids": ["int4-signed"],
        "quantize_learner": True,
        "group_size": 64,
        "exclude_modules": ["o_proj"],
        "scale_dtype": "bfloat16",
    }
    write_scheme(tmp_path, record)
    complete(tmp_path)
    assert find_checkpoint(str(tmp_path), "", record) == str(tmp_path)
    # A run on the other grid does not go on with its masters by mistake.
    with pytest.raises(ValueError, match="'w4a16'"):
        find_checkpoint(str(tmp_path), "", record_of("w4a16-observer", 64))


def test_a_checkpoint_is_resumed_by_its_own_plan_alone(tmp_path):
    write_scheme(tmp_path, record_of(MAPPING, high_precision_first=1))
    complete(tmp_path)
    assert json.loads((tmp_path / "qarl.json").read_text())["scheme"] == MAPPING
    assert find_checkpoint(str(tmp_path), "", record_of(MAPPING, high_precision_first=1)) == str(tmp_path)
    # The first expression that matches counts, so another order is another plan.
    turned = dict(reversed(MAPPING.items()))
    for other in (record_of(MAPPING), record_of(turned, high_precision_first=1), record_of("w4a16", 64)):
        with pytest.raises(ValueError, match="was trained with"):
            find_checkpoint(str(tmp_path), "", other)
