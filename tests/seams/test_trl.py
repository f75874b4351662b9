"""Parts of TRL that we use: names we import, override and replace, and lines of its long methods."""

import inspect

import pytest
from trl import GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from seams import imported_names, resolve, takes, without_place
from trl_qarl import QaRLTrainer
from trl_qarl.checkpoint.pushes import PushesPolicy
from trl_qarl.forward import FORWARD_KEYS
from trl_qarl.rollout.client import QaRLClient
from trl_qarl.rollout.generation import QaRLVLLMGeneration
from trl_qarl.trainer_mixins import PreparesPolicy


@pytest.mark.parametrize(("module", "name"), imported_names("trl"))
def test_what_is_imported_is_there(module, name):
    assert resolve(module, name) is not None


@pytest.mark.parametrize("cls", [QaRLClient, QaRLVLLMGeneration])
def test_methods_that_we_override_are_called(cls):
    assert without_place(cls, "trl") == []


@pytest.mark.parametrize("cls", [QaRLTrainer, PushesPolicy])
def test_methods_of_the_trainer_that_we_override_are_called(cls):
    assert without_place(cls, "trl", "transformers") == []


def test_the_forward_that_trl_scores_with_gets_no_positions():
    """`scoring_forward`: the model is called once, with keyword arguments, and used for nothing else."""
    source = inspect.getsource(GRPOTrainer._get_per_token_logps_and_entropies)
    assert "outputs = model(**model_inputs, labels=labels, fused_lm_head=True)" in source
    assert source.count("model(") == 1 and "model." not in source and '"position_ids"' not in source


def test_every_forward_argument_of_trl_reaches_the_scoring_forward():
    """`FORWARD_KEYS` repeats what TRL passes to `_get_per_token_logps_and_entropies`."""
    names = set(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)
    own = {"self", "model", "input_ids", "attention_mask", "logits_to_keep"}
    own |= {"batch_size", "compute_entropy", "compute_aux_loss"}
    assert names - own == set(FORWARD_KEYS)


def test_generate_is_called_where_log_probs_are_recorded():
    """`record_sampling_logps` shadows `generate` of the unwrapped model inside `_generate_single_turn`."""
    source = inspect.getsource(GRPOTrainer._generate_single_turn)
    assert "unwrapped_model.generate(" in source and "logits_processor" not in source


def test_the_generation_backend_is_built_and_used_where_it_was():
    """`replaced_in_trl` and `QaRLVLLMGeneration`."""
    assert grpo_trainer.VLLMGeneration is VLLMGeneration
    assert {"sync_weights", "generate", "_init_vllm"} <= vars(VLLMGeneration).keys()
    assert "self._init_vllm()" in inspect.getsource(VLLMGeneration.__init__)
    turn = inspect.getsource(grpo_trainer.GRPOTrainer._generate_single_turn)
    assert "self.state.global_step != self._last_loaded_step" in turn
    # The exception that `EngineLost` is, sent in place of completions, is raised where they are iterated.
    assert "for ids in all_prompt_ids" in inspect.getsource(VLLMGeneration.generate)


def test_trls_constructor_goes_in_the_order_in_which_a_policy_is_loaded_prepared_and_given_its_numerics():
    """`replaced_in_trl` and `PreparesPolicy`."""
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


def test_rewards_of_a_batch_are_kept_by_the_functions_name():
    """`Recorder.observe_rewards`: gathered from all processes, and NaN for `None`."""
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert 'self._logs["rewards"][name].extend(rewards_per_func[:, i].tolist())' in source


def test_losses_ask_for_entropies_and_scoring_does_not():
    """How the forward that scores a rollout is told from that of the loss."""
    assert "compute_entropy=True" in inspect.getsource(GRPOTrainer._compute_loss)
    assert "compute_entropy" not in inspect.getsource(GRPOTrainer._generate_and_score_completions)


def test_the_client_has_what_the_transports_call():
    for name in ("init_communicator", "close_communicator", "update_named_params", "generate", "image_features"):
        assert hasattr(VLLMClient, name), name
    assert "_updating_weights" in inspect.getsource(VLLMClient.update_named_params)
    # Where a refusal is heard while NCCL still waits.
    for function in (VLLMClient.update_named_params, VLLMClient.init_communicator):
        assert "executor.submit(" in inspect.getsource(function) and "self._post" in inspect.getsource(function)
    assert takes(VLLMClient.__init__, "base_url", "group_port", "connection_timeout") == []
    assert "self.check_server(" in inspect.getsource(VLLMClient.__init__)


def test_the_names_that_env_replaces_are_looked_up_there():
    from trl.scripts import env

    source = inspect.getsource(env.print_env)
    assert hasattr(env, "version") and 'version("vllm")' in source and "is_vllm_available" in source


def test_the_launcher_finds_what_the_command_line_leaves_over():
    from trl.cli.commands.training import _subtract_subsequence

    assert _subtract_subsequence(["a", "b", "c"], ["b"]) == ["a", "c"]
