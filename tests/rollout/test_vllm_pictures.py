"""
Training on pictures with rollouts in vLLM: prompts, log-probs before and after updates of all weights, and what is
seen when an engine is shown something else. One engine for each class of models.
"""

import copy
import gc
import json
import re

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForImageTextToText, AutoProcessor

from testing_utils import logged
from testing_utils.pictures import (
    KINDS,
    make_mixed_problems,
    make_picture_problems,
    make_picture_trainer,
    make_tiny_picture_model,
    needs_torchvision,
)
from testing_utils.towers import SHOWN, make_shown_model
from trl_qarl import prepare_model
from trl_qarl.checkpoint.load import load_frozen_model
from trl_qarl.cli import main
from trl_qarl.engines import pictures
from trl_qarl.engines.in_process import load_engine
from trl_qarl.quantization.inventory import Inventory
from trl_qarl.rollout.failures import EngineLost
from trl_qarl.sync.canary import Canary
from trl_qarl.wire.protocol import PublishError


pytest.importorskip("vllm")
pytestmark = [needs_torchvision, pytest.mark.vllm, pytest.mark.slow, pytest.mark.xdist_group("pictures")]
pytestmark += [pytest.mark.usefixtures("quick_engines")]

SEVERAL = ((56, 42), (84, 28))
# One whose processor pads rows, and one whose does not.
OFTEN = ("smolvlm", "qwen3_vl")


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.nightly) for kind in KINDS]
)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def trained(kind, tmp_path_factory):
    """A trainer after three updates of all weights, and what they were before."""
    folder = tmp_path_factory.mktemp(kind)
    scheme = {"smolvlm": "bf16", "qwen2_vl": "bf16"}.get(kind, "w4a16")
    trainer = make_picture_trainer(
        make_tiny_picture_model(folder, kind),
        folder / "out",
        make_picture_problems(sizes=SEVERAL),
        scheme=scheme,
        # vLLM's kernels of linear attention for CPUs take only bfloat16.
        bf16=kind == "qwen3_5",
        vllm_max_model_length=512,
    )
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    yield trainer, before
    del trainer
    gc.collect()


@pytest.fixture
def limit(trained):
    """Bound of a mean distance of log-probs. In float32 only the order of sums differs; in bfloat16 pictures may have
    twice the distance of text."""
    trainer, _ = trained
    return 2 * max(logged(trainer, "publish/canary_abs_logp")) if trainer.args.bf16 else 1e-5


def test_learner_and_engine_agree_before_and_after_updates(trained, limit):
    """Each rollout was checked to have the learner's prompts."""
    trainer, before = trained
    assert len(logged(trainer, "mismatch/abs_logp_mean")) == 3
    assert max(logged(trainer, "mismatch/abs_logp_mean")) < limit
    assert max(logged(trainer, "publish/canary_picture_abs_logp")) < limit
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert {name for name in before if "vis" in name} and before.keys() - moved <= {
        "model.visual.patch_embed.proj.bias"
    }


@pytest.mark.nightly
@pytest.mark.parametrize("kind", SHOWN)
def test_pictures_of_further_classes_are_the_learners(kind, tmp_path):
    """Two of different sizes, with a tower that is trained."""
    folder, problems = make_shown_model(tmp_path, kind), make_picture_problems(sizes=SEVERAL)
    # vLLM caches processors by the folder.
    trainer = make_picture_trainer(
        folder, tmp_path / f"{kind}-out", problems, scheme="w4a16", vllm_max_model_length=512
    )
    trainer.train()
    for name in ("mismatch/abs_logp_mean", "publish/canary_picture_abs_logp"):
        assert len(logged(trainer, name)) == 3 and max(logged(trainer, name)) < 1e-5


def test_layers_outside_the_decoder_are_published_as_they_are(trained):
    trainer, before = trained
    published = trainer.vllm_generation.publisher._published
    names = Inventory.of(trainer.model).names
    if trainer.args.scheme == "bf16":
        assert published.keys() == {names.of_tensor(name) for name in before}
        return
    skipped = trainer.swap_report.skipped
    around = {name for name, why in skipped.items() if why == "outside the language model"}
    assert around and all(re.search("vis|connector|projector", name) for name in around)
    assert trainer.swap_report.converted and not any("vis" in name for name in trainer.swap_report.converted)
    ignored = trainer.vllm_generation.description["quantization_config"]["ignore"]
    assert around < {*ignored} and {f"{names.of_tensor(name)}.weight" for name in around} < published.keys()


def publish(trainer):
    return trainer.vllm_generation.publisher.publish("again")


def test_the_canary_sees_a_blanked_tensor_of_the_tower(trained, limit):
    """No fingerprint is taken between two publications, and the text alone is scored as before."""
    trainer, _ = trained
    publisher = trainer.vllm_generation.publisher
    assert publish(trainer)["publish/canary_picture_abs_logp"] < limit
    learner = publisher.canary.score()
    model = publisher.engine._worker.model_runner.model
    name, weight = next((n, p) for n, p in model.named_parameters() if "patch" in n and p.ndim > 1)
    right = weight.detach().clone()
    with torch.no_grad():
        weight.zero_()
    try:
        publisher.engine._abort_requests()
        with pytest.raises(PublishError, match="16 fixed tokens after a picture are .* nats from the learner's"):
            publisher.canary.compare(learner, publisher.engine)
    finally:
        with torch.no_grad():
            weight.copy_(right)
        publisher.engine._abort_requests()
    publisher.canary.compare(learner, publisher.engine)


def test_the_canary_sees_prompts_that_are_expanded_twice(trained, monkeypatch):
    trainer, _ = trained
    publisher = trainer.vllm_generation.publisher
    prompt = next(text.token_ids for text in publisher.canary.texts if text.pictures)
    monkeypatch.setattr(prompt, "sent", list(prompt))
    with pytest.raises(PublishError, match="The engine makes another prompt of the same picture and text"):
        publish(trainer)
    monkeypatch.undo()
    publish(trainer)


def test_the_canary_and_the_description_see_another_processor(trained, monkeypatch):
    trainer, _ = trained
    publisher = trainer.vllm_generation.publisher
    other = copy.deepcopy(publisher.processing_class)
    # Gemma 4's does not normalize.
    other.image_processor.image_mean, other.image_processor.do_normalize = [0.1, 0.2, 0.3], True
    monkeypatch.setattr(publisher, "processing_class", other)
    with pytest.raises(ValueError, match=r"pictures.image processor: learner .*0.1, 0.2, 0.3.*engine"):
        publisher.check_engine()
    monkeypatch.undo()
    right = publisher.canary.texts[-1]
    prompt, inputs, shown = pictures.canary_prompt(other, 16)
    publisher.canary.texts[-1] = right._replace(token_ids=prompt, inputs=inputs, pictures=shown)
    with pytest.raises(PublishError, match="after a picture are .* nats from the learner's"):
        publish(trainer)
    publisher.canary.texts[-1] = right
    publish(trainer)


def test_a_rollout_whose_prompt_is_expanded_twice_is_lost(trained, monkeypatch):
    trainer, _ = trained
    expanded = pictures.expanded_prompts

    def as_trl(prompt_ids, texts, tokenizer):
        return [pictures.ExpandedPrompt(row, row) for row in expanded(prompt_ids, texts, tokenizer)]

    monkeypatch.setattr("trl_qarl.trainer.qarl_trainer.expanded_prompts", as_trl)
    with pytest.raises(EngineLost, match="prompt 0 of 4 comes back as"):
        trainer.evaluate(make_picture_problems(2))
    monkeypatch.undo()
    assert trainer.evaluate(make_picture_problems(2))["eval_reward"] >= 0


def test_rows_without_pictures_are_drawn_or_refused(trained, limit):
    trainer, _ = trained
    if "image_grid_thw" not in trainer.processing_class.image_processor.model_input_names:
        with pytest.raises(ValueError, match=r"prompt 0 of 8 has no picture, .*Processor pads rows"):
            trainer.evaluate(make_mixed_problems(4))
        return
    trainer.evaluate(make_mixed_problems(4))
    assert 0 < logged(trainer, "eval_mismatch/abs_logp_mean")[-1] < limit


@pytest.fixture(scope="module")
def one_kind(tmp_path_factory):
    """A model for what is the same for all classes."""
    return make_tiny_picture_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


def test_unfilled_buffers_and_other_norms_are_refused(one_kind, tmp_path, monkeypatch):
    """As vLLM makes them by default. The text alone has the learner's log-probs."""
    monkeypatch.setattr("trl_qarl.engines.pictures.engine_arguments", lambda model: {})
    with pytest.raises(ValueError, match="pictures.mm_device_do_normalize: learner False, engine True"):
        make_picture_trainer(one_kind, tmp_path, scheme="w4a16")
    monkeypatch.setattr("trl_qarl.sync.publisher.differences", lambda *args: [])
    trainer = make_picture_trainer(one_kind, tmp_path, scheme="w4a16")
    with pytest.raises(EngineLost, match="input_norm.weight: dummy loading has filled this buffer with noise"):
        trainer.train()


def test_a_tower_may_be_quantized_and_frozen(one_kind, tmp_path):
    """With gradient checkpointing, and several updates on a generation batch, which is resumed in the middle."""
    options = {
        "scheme": {r"re:.*(visual\.blocks|vision_model).*": "w8a16", "_default": "w4a16"},
        "gradient_checkpointing": True,
        "steps_per_generation": 2,
        "max_steps": 4,
    }

    def make(folder, **more):
        model = AutoModelForImageTextToText.from_pretrained(one_kind, dtype=torch.float32)
        encoder = model.get_encoder(modality="image")
        encoder.requires_grad_(False)
        trainer = make_picture_trainer(model, folder, make_picture_problems(sizes=SEVERAL), **(options | more))
        return trainer, {name: p.detach().clone() for name, p in encoder.named_parameters()}

    trainer, before = make(tmp_path / "whole", save_strategy="steps", save_steps=3, seed=5)
    trainer.train()
    assert max(logged(trainer, "mismatch/abs_logp_mean")) < 1e-5
    assert len(logged(trainer, "mismatch/abs_logp_mean")) == 2
    schemes = {scheme.name for scheme in trainer.swap_report.schemes.values()}
    assert schemes == {"w8a16", "w4a16"}
    encoder = trainer.model.get_encoder(modality="image")
    assert all(torch.equal(p, before[name]) for name, p in encoder.named_parameters())
    whole = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    del trainer, encoder
    gc.collect()
    resumed, _ = make(tmp_path / "whole", save_strategy="no", seed=5)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert [name for name, p in resumed.model.named_parameters() if not torch.equal(p, whole[name])] == []


def test_rows_without_pictures_are_trained_on_beside_others(one_kind, tmp_path):
    """One sequence in each update, so that every other one sees no picture."""
    options = {"per_device_train_batch_size": 1, "steps_per_generation": 8, "max_steps": 16, "learning_rate": 1e-4}
    trainer = make_picture_trainer(one_kind, tmp_path, make_mixed_problems(), scheme="w4a16", **options)
    without = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: without.append("pixel_values" not in kwargs), with_kwargs=True
    )
    trainer.train()
    assert True in without and False in without
    assert len(logged(trainer, "mismatch/abs_logp_mean")) == 2
    assert max(logged(trainer, "mismatch/abs_logp_mean")) < 1e-5


def test_lora_on_the_language_model_is_trained_and_evaluated(one_kind, tmp_path):
    """Paths name the pictures of the training."""
    peft = pytest.importorskip("peft")
    problems = make_picture_problems()
    paths = [[str(tmp_path / f"{row}.png")] for row in range(len(problems))]
    for [picture], [path] in zip(problems["images"], paths, strict=True):
        picture.save(path)
    problems = Dataset.from_dict({"prompt": problems["prompt"], "images": paths})
    targets = r".*(language_model|text_model)\.layers\..*_proj"
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=targets, init_lora_weights="gaussian")
    trainer = make_picture_trainer(
        one_kind,
        tmp_path / "run",
        problems,
        eval_dataset=make_picture_problems(2),
        peft_config=config,
        scheme="w4a16",
    )
    trainer.train()
    assert max(logged(trainer, "mismatch/abs_logp_mean")) < 1e-5
    assert max(logged(trainer, "publish/canary_picture_abs_logp")) < 1e-5
    assert trainer.evaluate()["eval_reward"] >= 0


@pytest.mark.xdist_group("warm_servers")
@pytest.mark.parametrize("kind", ["smolvlm", pytest.param("qwen2_5_vl", marks=pytest.mark.nightly)])
def test_a_server_takes_pictures_and_tiles_with_their_prompts(kind, tmp_path, monkeypatch, warm):
    server = warm.serve(monkeypatch, in_one_process=False)
    model, problems = make_tiny_picture_model(tmp_path, kind), make_picture_problems(sizes=SEVERAL)
    trainer = make_picture_trainer(model, tmp_path / "run", problems, scheme="w4a16", **server)
    trainer.train()
    assert len(logged(trainer, "mismatch/abs_logp_mean")) == 3
    assert max(logged(trainer, "mismatch/abs_logp_mean")) < 1e-5
    assert max(logged(trainer, "publish/canary_picture_abs_logp")) < 1e-5


def engine_scores(llm, text):
    from trl_qarl.engines.in_process import InProcessEngine

    return torch.tensor(InProcessEngine(llm).score(text.token_ids, text.pictures))[-text.num_scored :]


def test_an_export_is_the_policy_in_transformers_and_in_vllm(one_kind, tmp_path):
    """Masters become one by the command; the tower has the scheme of the plan."""
    scheme = json.dumps({r"re:.*(visual\.blocks|vision_model\.enc).*": "w8a16", "_default": "w4a16"})
    options = {"model_name_or_path": one_kind, "output_dir": str(tmp_path), "scheme": scheme, "dtype": "float32"}
    assert main(["export", *(word for name, value in options.items() for word in (f"--{name}", value))]) == 0
    assert "outside the language model" in (tmp_path / "README.md").read_text()
    policy = AutoModelForImageTextToText.from_pretrained(one_kind, dtype=torch.float32).eval()
    prepare_model(policy, json.loads(scheme))
    canary = Canary(policy, torch.float32, AutoProcessor.from_pretrained(tmp_path))
    text = canary.texts[-1]
    ours = canary._log_probs(text)
    for model in (AutoModelForImageTextToText.from_pretrained(tmp_path).eval(), load_frozen_model(str(tmp_path))):
        assert (Canary(model, torch.float32, None)._log_probs(text) - ours).abs().mean() < 1e-5
    assert (engine_scores(load_engine(tmp_path, max_model_len=256), text) - ours).abs().mean() < 1e-5
