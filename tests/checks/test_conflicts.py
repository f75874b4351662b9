"""Options that cannot work together, row by row."""

import pytest

from testing_utils.trainings import config
from trl_qarl.checks.conflicts import CONFLICTS, problems_of_conflicts


ALL_SERVER = {"use_vllm": True, "vllm_mode": "server"}


@pytest.mark.parametrize("row", CONFLICTS, ids=lambda row: "-".join(row.example))
def test_a_conflict_is_refused_with_reason_and_way_out(tmp_path, row):
    options = {name: value for name, value in row.example.items() if name != "use_cpu"}
    with pytest.raises(ValueError) as refused:
        config(tmp_path, **options)
    quoted = [f"{name}={value!r}" for name, value in row.example.items()]
    assert all(text in str(refused.value) for text in (*quoted, f": {row.why}. {row.use}."))


@pytest.mark.parametrize(
    "options", [{}, ALL_SERVER, ALL_SERVER | {"rollout_ahead": 1}, ALL_SERVER | {"vllm_server_host": "[::1]"}], ids=str
)
def test_no_conflict_is_found_in_what_works(tmp_path, options):
    assert not [*problems_of_conflicts(config(tmp_path, **options))]


@pytest.mark.parametrize(
    ("options", "quoted"),
    [
        ({"use_vllm": True, "vllm_mode": "colocate", "rollout_ahead": 1}, "vllm_mode='colocate'"),
        (ALL_SERVER | {"vllm_server_autostart": True, "vllm_token_file": "t"}, "vllm_server_autostart=True"),
        (ALL_SERVER | {"vllm_server_autostart": True, "vllm_server_base_url": "http://a:1"}, "'http://a:1'"),
        ({"vllm_server_base_url": "a:8000"}, "'a:8000'"),
        ({"vllm_token_file": "t"}, "use_vllm=False"),
        (ALL_SERVER | {"vllm_server_host": "10.0.0.7:8000"}, "vllm_server_host='10.0.0.7:8000'"),
        (ALL_SERVER | {"vllm_server_host": ""}, "vllm_server_host=''"),
        (ALL_SERVER | {"rollout_ahead": 1, "quantize_learner": False}, "quantize_learner=False: a batch is drawn"),
        ({"optim": "adalomo"}, "adalomo"),
        ({"scheme": "bf16", "exclude_modules": ["o_proj"]}, "exclude_modules=.'o_proj'.: this scheme"),
        ({"scheme": "bf16", "fp16": True}, "use_cpu=True: quantized training in float16"),
        ({"vllm_server_autostart": True}, "vllm_server_autostart=True, vllm_mode=.*, use_vllm=False"),
        ({"push_to_hub": True, "hub_strategy": "all_checkpoints"}, "all_checkpoints"),
        ({"mask_truncated_completions": True, "generation_kwargs": {"stop_strings": "."}}, "completions=True"),
    ],
    ids=str,
)
def test_further_values_of_a_conflict_are_refused(tmp_path, options, quoted):
    with pytest.raises(ValueError, match=quoted):
        config(tmp_path, **options)
