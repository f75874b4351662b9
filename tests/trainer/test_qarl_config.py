import ast
import dataclasses
import inspect
import json
import logging
import pickle
import re

import pytest
from trl import GRPOConfig

from testing_utils.trainings import config
from trl_qarl.options import EngineOptions, LearnerOptions, ObjectiveOptions, QuantOptions, own_options
from trl_qarl.quantization.plan import get_plan
from trl_qarl.trainer.qarl_config import QaRLConfig


def test_defaults_are_those_of_the_papers_table_2(tmp_path):
    c = config(tmp_path)
    assert (c.learning_rate, c.weight_decay, c.beta, c.temperature, c.top_p) == (1e-6, 0.01, 0.0, 1.0, 1.0)
    assert (c.positive_epsilon_high, c.negative_epsilon_low, c.negative_epsilon_high) == (4e-4, 3e-4, 7e-4)
    assert (c.mismatch_cap, c.epsilon_high) == (2.0, None)
    assert (c.num_generations, c.num_iterations, c.optim, c.loss_type, c.scheme) == (8, 1, "muon", "tbpo", "w4a16")
    assert c.steps_per_generation == 8 * c.gradient_accumulation_steps
    assert config(tmp_path, gradient_accumulation_steps=3).steps_per_generation == 24


def test_no_other_default_of_trl_changes(tmp_path):
    ours = {f.name: f.default for f in dataclasses.fields(QaRLConfig)}
    changed = {f.name for f in dataclasses.fields(GRPOConfig) if ours[f.name] != f.default}
    assert changed == {"optim", "weight_decay", "loss_type"}


def test_help_of_every_own_option_is_its_text_in_the_docstring():
    def plain(text):
        return " ".join(re.sub(r"[`\[\]~]", "", text).split())

    own = [f for f in dataclasses.fields(QaRLConfig) if f.name in own_options(QaRLConfig, GRPOConfig)]
    classes = (QuantOptions, ObjectiveOptions, LearnerOptions, EngineOptions, QaRLConfig)
    entries = [e for cls in classes for e in re.split(r"\n {4}(?=\w)", inspect.cleandoc(cls.__doc__))[1:]]
    documented = {name: entry for entry in entries for name in entry.partition(" (")[0].split(", ")}
    assert {f.name for f in own} == documented.keys()
    for option in own:
        head, text = documented[option.name].split(":\n", 1)
        assert len(option.metadata["help"]) > 20 and plain(option.metadata["help"]) == plain(text), option.name
        default = re.search(r"defaults to `(.*)`\)", head)
        assert (ast.literal_eval(default[1]) if default else None) == option.default, option.name


def test_scheme_may_be_a_mapping_also_as_json(tmp_path):
    mapping = {"re:.*mlp.*": "w4a16", "_default": "w8a8"}
    for scheme in (mapping, json.dumps(mapping)):
        args = config(tmp_path, scheme=scheme, group_size=64)
        assert args.scheme == mapping and args.is_quantized and args.plan.name == "w4a16-w8a8"
        assert args.plan == get_plan(mapping, 64)
    assert not config(tmp_path, scheme={"_default": None}).is_quantized
    assert config(tmp_path, numerics="engine", bf16=True, scheme=mapping, group_size=32).numerics == "engine"


@pytest.mark.parametrize("has_fast_bf16", [True, False])
def test_without_an_accelerator_the_cpu_is_chosen_and_said(tmp_path, monkeypatch, caplog, has_fast_bf16):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr("trl_qarl.trainer.qarl_config.has_fast_bf16", lambda: has_fast_bf16)
    with caplog.at_level(logging.WARNING, "trl_qarl"):
        c = QaRLConfig(str(tmp_path))
    assert (c.use_cpu, c.bf16, c.device.type) == (True, has_fast_bf16, "cpu")
    (record,) = [record for record in caplog.records if "accelerator" in record.message]
    assert f"use_cpu=True) with bf16={has_fast_bf16}" in record.message
    # What is given is kept.
    assert QaRLConfig(str(tmp_path), bf16=True).bf16 is True
    assert QaRLConfig(str(tmp_path), bf16=False).bf16 is False
    caplog.clear()
    assert QaRLConfig(str(tmp_path), use_cpu=True, bf16=True).bf16 is True
    assert not [record for record in caplog.records if record.name.startswith("trl_qarl")]


def test_an_accelerator_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.setattr("trl_qarl.trainer.qarl_config.has_fast_bf16", lambda: False)
    c = QaRLConfig(str(tmp_path))
    assert (c.use_cpu, c.bf16) == (False, True)


def test_a_precision_agrees_with_that_of_the_launch(tmp_path, monkeypatch):
    monkeypatch.setattr("trl_qarl.trainer.qarl_config.has_fast_bf16", lambda: False)
    assert not QaRLConfig(str(tmp_path), use_cpu=True).bf16
    for launched, given in (("fp16", "bf16"), ("no", "bf16"), ("no", "no")):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
        assert QaRLConfig(str(tmp_path), bf16=given == "bf16").mixed_precision == given
    for launched in ("fp16", "fp8", "bf16"):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
        said = f"bf16=False, but accelerate was launched with `mixed_precision: {launched}`"
        with pytest.raises(ValueError, match=said):
            QaRLConfig(str(tmp_path), bf16=False)
    # On a CPU the launch decides the default.
    assert QaRLConfig(str(tmp_path), use_cpu=True).bf16


@pytest.mark.parametrize(
    "copied",
    [
        lambda made: dataclasses.replace(made, max_steps=3),
        lambda made: QaRLConfig(**{**dataclasses.asdict(made), "max_steps": 3}),
        lambda made: pickle.loads(pickle.dumps(made)),
    ],
    ids=["replace", "asdict", "pickle"],
)
@pytest.mark.parametrize("steps", [None, 4])
def test_a_copy_of_a_configuration_is_one(tmp_path, copied, steps):
    """TRL's cannot be copied: it has a size and a number of steps of a generation batch, and TRL takes one of them."""
    made = config(tmp_path, max_steps=3, steps_per_generation=steps)
    copy = copied(made)
    assert copy.to_dict() == made.to_dict()
    assert copy.chooses_steps is made.chooses_steps is (steps is None)


def test_a_copy_with_other_sizes_is_refused_as_by_trl(tmp_path):
    with pytest.raises(ValueError, match="'generation_batch_size' and 'steps_per_generation' can not be both"):
        dataclasses.replace(config(tmp_path), per_device_train_batch_size=16)


def test_paths_and_no_tracker_are_taken_as_text(tmp_path):
    """A YAML file whose `report_to:` has no value gives `None`."""
    assert config(tmp_path, report_to=None).report_to == []
    made = QaRLConfig(tmp_path, use_cpu=True, resume_from_checkpoint=tmp_path / "checkpoint-1")
    assert (made.output_dir, made.resume_from_checkpoint) == (str(tmp_path), str(tmp_path / "checkpoint-1"))
