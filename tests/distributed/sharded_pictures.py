"""What a trainer of a model of pictures trains with sharded masters or sharded state. Run by shards.py."""

from importlib.util import find_spec

import pytest
import zero
from sharded_runs import COLOCATED, assert_follows, assert_publishes, assert_trained_the_same, make_model, train
from transformers import AutoModelForImageTextToText

from testing_utils.pictures import make_mixed_problems
from trl_qarl.quantization.storage import is_sharded, whole


ARCH = "qwen2_5_vl"
PICTURES = {"arch": ARCH, "max_steps": 2, "optim": "sgd", "learning_rate": 1e-2}


def assert_trains_the_tower(trainer, folder):
    before = make_model(folder, ARCH, loader=AutoModelForImageTextToText).model.visual
    after = trainer.model.model.visual.named_parameters()
    assert [name for name, p in after if whole(p.detach()).equal(before.get_parameter(name))] == []


def pictures_train_what_they_train_with_whole_masters(folder):  # nightly
    """Tower and connector are trained and sharded, too."""
    [ddp] = train(folder, "pictures-ddp", **PICTURES)
    assert_trains_the_tower(ddp, folder)
    for trainer in train(folder, "pictures", launch={}, **PICTURES):
        assert_trained_the_same(trainer, ddp)
        assert is_sharded(trainer.model.model.visual)
        assert_publishes(trainer, ddp)


def processes_that_have_pictures_or_none_are_told_so(folder):
    """Each process has rows of one kind only. Both raise before one waits for the other."""
    with pytest.raises(ValueError, match="prompt [04] of 8 has no picture.* the other 1 would wait for it"):
        next(train(folder, "pictures-apart", rows=make_mixed_problems(2), **PICTURES))


def zero_trains_pictures(folder):  # nightly
    for stage in (2, 3):
        adds_up = [zero.AddsUpAsDeepSpeed()] if stage == 3 else []
        [ddp] = train(folder, f"pictures-zero{stage}-ddp", callbacks=adds_up, **PICTURES)
        assert_trains_the_tower(ddp, folder)
        launch = zero.launched(stage, bf16=False)
        for trainer in train(folder, f"pictures-zero{stage}", launch=launch, **PICTURES):
            zero.assert_sharded(trainer, stage)
            assert_trained_the_same(trainer, ddp)


def pictures_are_shown_to_an_engine_in_every_process(folder):  # nightly
    """With whole and with sharded masters."""
    if find_spec("vllm") is None:
        return
    for name, launch in (("ddp", None), ("fsdp", {})):
        for trainer in train(folder, f"pictures-colocated-{name}", launch=launch, **PICTURES | COLOCATED):
            assert_follows(trainer, bound=1e-4)
            rows = [row for row in trainer.state.log_history if "reward" in row]
            assert max(row["publish/canary_picture_abs_logp"] for row in rows) < 1e-5
