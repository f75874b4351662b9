"""The record of a checkpoint: which scheme each layer was trained for."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from testing_utils.trainings import RECORD
from trl_qarl.checkpoint import marker
from trl_qarl.checkpoint.record import (
    check_checkpoint,
    differing_records,
    folder_to_resume,
    read_record,
    scheme_record,
    scheme_settings,
    write_scheme,
)
from trl_qarl.quantization.plan import get_plan


def written(*left_out, **changed):
    """A record of a run as JSON, without some entries and with others changed."""
    return json.dumps({name: value for name, value in (RECORD | changed).items() if name not in left_out}).encode()


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
    for ours in records:
        marker.begin(tmp_path)
        write_scheme(tmp_path, ours)
        marker.complete(tmp_path)
        check_checkpoint(tmp_path, ours)
        for other in records:
            if other is not ours:
                with pytest.raises(ValueError, match="was trained with"):
                    check_checkpoint(tmp_path, other)


def test_other_records_are_told_by_what_differs():
    ours = record_of("w4a16")
    with_adapter = ours | {"lora_mode": "adapter", "base": "0a"}
    assert differing_records(with_adapter, ours) == ["an adapter there, none here"]
    assert differing_records(ours, with_adapter | {"scale_dtype": "float32"}) == [
        "no adapter there, one here",
        "scale_dtype='bfloat16' there, 'float32' here (by `bf16` and `fp16`)",
    ]
    assert differing_records(with_adapter, with_adapter | {"lora_mode": "merged", "base": "0b"}) == [
        "lora_mode='adapter' there, 'merged' here",
        "base='0a' there, '0b' here (a fingerprint of the base)",
    ]
    assert differing_records(ours | {"global_scales": {"a": 1.0}}, ours) == ["global_scales"]
    assert differing_records(ours, dict(ours)) == []


@pytest.mark.parametrize("spelled", ["o_proj", ["o_proj"], ("o_proj",)], ids=str)
def test_one_name_to_exclude_may_be_written_without_a_list(spelled):
    args = SimpleNamespace(quantize_learner=True, exclude_modules=spelled)
    assert scheme_settings(args, get_plan("w4a16")) == scheme_settings(ARGS, get_plan("w4a16"))
    args.exclude_modules = []
    assert scheme_settings(args, get_plan("w4a16"))["exclude_modules"] is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((content, "read") for content in (b"{", b"\xff\xfe", b"[1]")),
        (written("scale_dtype"), "'scale_dtype'"),
        (written(scale_dtype="int3"), "scale_dtype='int3'"),
        (written(scheme=4), "scheme=4"),
        (written(scheme={"re:(": "w4a16"}, group_size=None), "scheme: 're:\\('"),
        (written(group_size="128"), "group_size='128'"),
    ],
)
def test_a_broken_record_is_named(tmp_path, content, message):
    (tmp_path / "qarl.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"{tmp_path}/qarl.json cannot be .*{message}"):
        read_record(tmp_path / "qarl.json")


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
