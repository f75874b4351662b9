"""Settings on which the states of a checkpoint depend."""

from types import SimpleNamespace

from transformers import Gemma4TextConfig

from trl_qarl.checks.resume import state_settings


def test_sizes_that_differ_among_layers_are_compared():
    """transformers refuses to read them from a configuration."""
    config = Gemma4TextConfig(num_hidden_layers=6, head_dim=16, global_head_dim=32)
    settings = state_settings(SimpleNamespace(optim="muon", lr_scheduler_type="constant"), config, None)
    assert settings["head_dim"] == 16 and settings["num_hidden_layers"] == 6
