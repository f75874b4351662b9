"""Parts of TRL that we use: names we import, override and replace, and lines of its long methods."""

import inspect

import pytest
from trl import GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from seams import lacking, rows, takes, without_place
from trl_qarl import QaRLTrainer
from trl_qarl.engines.client import QaRLClient
from trl_qarl.engines.transformers_rollout import OwnGenerationConfig, SamplingLogProbs
from trl_qarl.forward import FORWARD_KEYS
from trl_qarl.rollout.generation import QaRLVLLMGeneration
from trl_qarl.trainer.pushes import PushesPolicy
from trl_qarl.trainer.saves import SavesRuns
from trl_qarl.trainer.trainer_mixins import PreparesPolicy, ScoresRollouts


@pytest.mark.parametrize(
    "cls",
    [
        *(QaRLClient, QaRLVLLMGeneration, OwnGenerationConfig, SamplingLogProbs),
        *(QaRLTrainer, SavesRuns, PushesPolicy, ScoresRollouts),
    ],
)
def test_methods_that_we_override_are_called(cls):
    assert without_place(cls, "trl", "transformers") == []


def test_the_forward_that_trl_scores_with_gets_no_positions():
    """`scoring_forward`: the model is called once, with keyword arguments, and used for nothing else."""
    source = inspect.getsource(GRPOTrainer._get_per_token_logps_and_entropies)
    assert "outputs = model(**model_inputs, labels=labels, fused_lm_head=True)" in source
    assert source.count("model(") == 1 and "model." not in source and '"position_ids"' not in source


def test_forward_arguments_of_trl_reach_the_scoring():
    """`FORWARD_KEYS` repeats what TRL passes to `_get_per_token_logps_and_entropies`."""
    names = set(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)
    own = {"self", "model", "input_ids", "attention_mask", "logits_to_keep"}
    own |= {"batch_size", "compute_entropy", "compute_aux_loss"}
    assert names - own == set(FORWARD_KEYS)


TRAINER, GENERATION = "trl.trainer.grpo_trainer:GRPOTrainer", "trl.generation.vllm_generation:VLLMGeneration"
CLIENT = "trl.generation.vllm_client:VLLMClient"
SOURCES = f"""
# `record_sampling_logps` shadows `generate` of the unwrapped model
{TRAINER}._generate_single_turn unwrapped_model.generate( | self.state.global_step != self._last_loaded_step
{GENERATION}.__init__ self._init_vllm()
# The exception that `EngineLost` is, sent in place of completions, is raised where they are iterated
{GENERATION}.generate for ids in all_prompt_ids
# How the forward that scores a rollout is told from that of the loss
{TRAINER}._compute_loss compute_entropy=True
{CLIENT}.__init__ self.check_server(
# Where a refusal is heard while NCCL still waits
{CLIENT}.update_named_params _updating_weights | executor.submit( | self._post
{CLIENT}.init_communicator executor.submit( | self._post
"""


@pytest.mark.parametrize(("place", "parts"), rows(SOURCES))
def test_sources_have_the_parts_that_we_rely_on(place, parts):
    assert lacking(place, *parts.split(" | ")) == []


def test_generation_takes_no_logits_processor():
    assert "logits_processor" not in inspect.getsource(GRPOTrainer._generate_single_turn)
    assert "compute_entropy" not in inspect.getsource(GRPOTrainer._generate_and_score_completions)


def test_the_generation_backend_has_the_replaced_methods():
    assert grpo_trainer.VLLMGeneration is VLLMGeneration
    assert {"sync_weights", "generate", "_init_vllm"} <= vars(VLLMGeneration).keys()


def test_trls_constructor_keeps_its_order():
    """`replaced` and `PreparesPolicy`."""
    source = inspect.getsource(grpo_trainer.GRPOTrainer.__init__)
    steps = [
        " model = create_model_from_path(model, ",
        " model = get_peft_model(model, ",
        "        super().__init__(\n",
        "self.ref_model = create_model_from_path(",
        "        add_fused_lm_head(\n            self.model",
        "self.vllm_generation = VLLMGeneration(",
        "self.generation_config = GenerationConfig(",
    ]
    assert [source.count(step) for step in steps] == [1] * len(steps)
    places = [source.index(step) for step in steps]
    assert places == sorted(places)
    after = QaRLTrainer.__mro__[QaRLTrainer.__mro__.index(GRPOTrainer) + 1]
    assert after is PreparesPolicy


def test_the_client_has_what_the_transports_call():
    for name in ("init_communicator", "close_communicator", "update_named_params", "generate", "image_features"):
        assert hasattr(VLLMClient, name), name
    assert takes(VLLMClient.__init__, "base_url", "group_port", "connection_timeout") == []
