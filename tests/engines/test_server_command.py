import json
import re

import pytest
from transformers import AutoConfig

from testing_utils.layers import one_layer
from trl_qarl.checkpoint.load import skeleton
from trl_qarl.engines.server_command import _IMPOSED, build_server_command, context_length, tensor_parallel_size
from trl_qarl.engines.spec import EngineSpec, added_fields
from trl_qarl.wire.protocol import TRANSFER_DIR_VARIABLE


def option(argv, name):
    return argv[argv.index(name) + 1]


def test_the_command_holds_everything_a_trainer_needs():
    scheme = {"quant_method": "compressed-tensors"}
    argv, environment = build_server_command(
        EngineSpec("some/model", scheme, "float32"), host="10.0.0.7", port=8001, vllm_args=["--max-model-len", "4096"]
    )
    assert argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert option(argv, "--model") == "some/model" and option(argv, "--dtype") == "float32"
    assert option(argv, "--host") == "10.0.0.7" and option(argv, "--port") == "8001"
    assert option(argv, "--load-format") == "dummy"
    assert json.loads(option(argv, "--hf-overrides")) == {"quantization_config": scheme}
    assert option(argv, "--logprobs-mode") == "processed_logprobs"
    assert json.loads(option(argv, "--weight-transfer-config")) == {"backend": "qarl_nccl"}
    assert option(argv, "--middleware").endswith("PublicationGate")
    assert option(argv, "--max-model-len") == "4096"
    assert environment == {"VLLM_SERVER_DEV_MODE": "1"}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("deepseek_v3", {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}),
        ("exaone_moe", {"sliding_windows": [16, None]}),
        ("ministral3", {"llama_4_scaling": {"original_max_position_embeddings": 16384, "beta": 0.1}}),
        ("mistral3", {}),
        ("qwen3_vl_moe", {"text_config": {"norm_topk_prob": True}}),
        ("qwen3", {}),
    ],
)
def test_an_engine_gets_fields_that_transformers_lacks(kind, fields):
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "num_hidden_layers": 2}
    config = AutoConfig.for_model(kind)
    text = config.get_text_config()
    for name, value in (layers if kind == "exaone_moe" else {"num_hidden_layers": 1}).items():
        setattr(text, name, value)
    assert added_fields(skeleton(config)) == fields
    spec = EngineSpec("m", {"quant_method": "compressed-tensors"}, fields=fields)
    overrides = json.loads(option(build_server_command(spec)[0], "--hf-overrides"))
    assert overrides == {"quantization_config": {"quant_method": "compressed-tensors"}, **fields}


def test_on_a_cpu_weights_go_through_files(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    argv, environment = build_server_command(EngineSpec("m"), on_cpu=True, transfer_dir="/shared/dir")
    assert json.loads(option(argv, "--weight-transfer-config")) == {"backend": "qarl"}
    assert "--enforce-eager" in argv and "--hf-overrides" not in argv
    assert environment[TRANSFER_DIR_VARIABLE] == "/shared/dir"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind" and environment["VLLM_CPU_KVCACHE_SPACE"] == "7"
    # Not a default: with AMX, vLLM would round activations.
    for name, value in (("VLLM_CPU_INT4_W4A8", "0"), ("VLLM_CPU_ATTN_SPLIT_KV", "0"), ("VLLM_MLA_DISABLE", "1")):
        monkeypatch.setenv(name, str(1 - int(value)))
        assert build_server_command(EngineSpec("m"), on_cpu=True)[1][name] == value


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_on_one_host_weights_go_through_files_unless_asked_for(host):
    """A trainer that waits for a server in NCCL waits without a time-out."""
    for transport, backend in ((None, "qarl"), ("nccl", "qarl_nccl")):
        argv, environment = build_server_command(EngineSpec("m"), host=host, transport=transport)
        assert json.loads(option(argv, "--weight-transfer-config")) == {"backend": backend}
        assert (TRANSFER_DIR_VARIABLE in environment) == (backend == "qarl")


@pytest.mark.parametrize("option", _IMPOSED)
def test_options_that_are_set_here_are_refused_with_the_reason(option):
    with pytest.raises(ValueError, match=re.escape(_IMPOSED[option])):
        build_server_command(EngineSpec("m"), vllm_args=[option, "2"])


@pytest.mark.parametrize(
    ("spelling", "option"),
    [
        ("--logprobs_mode=raw_logprobs", "--logprobs-mode"),
        # vLLM's parser takes the beginning of a name, and single entries of a dictionary.
        ("--load-f", "--load-format"),
        ("--hf-overrides.rope_theta", "--hf-overrides"),
        ("-qfp8", "-q"),
    ],
)
def test_an_option_is_refused_in_any_spelling(spelling, option):
    with pytest.raises(ValueError, match=re.escape(_IMPOSED[option])):
        build_server_command(EngineSpec("m"), vllm_args=[spelling])


def test_nccl_needs_gpus():
    with pytest.raises(ValueError, match="needs GPUs on both sides"):
        build_server_command(EngineSpec("m"), transport="nccl", on_cpu=True)


# The last ones only look like forbidden ones.
@pytest.mark.parametrize(
    "arguments", ["--data_parallel_size=2", "-dp 2", "--config-format hf --kv-cache-metrics -tp 2"]
)
def test_options_that_break_nothing_are_passed_on(arguments):
    argv, _ = build_server_command(EngineSpec("m"), vllm_args=arguments.split())
    assert " ".join(argv).endswith(arguments)


@pytest.mark.parametrize(
    ("scheme", "dtype", "on_cpu", "other_place", "message"),
    [
        ("w4a8", "bfloat16", True, False, "w4a8.*cannot roll out in vLLM on a CPU.*`use_vllm=False`"),
        ("w4a8", "float16", False, False, "not in float16"),
        ("w4a8-int8", "bfloat16", False, True, "scheme 'w4a8-int8' does not run on.*Choose 'w4a8'"),
    ],
)
def test_a_scheme_is_refused_where_vllm_computes_something_else(scheme, dtype, on_cpu, other_place, message):
    (_, config), (_, other) = one_layer(scheme), one_layer("w4a16")
    with pytest.raises(ValueError, match=message):
        build_server_command(EngineSpec("m", config, dtype), on_cpu=on_cpu)
    assert build_server_command(EngineSpec("m", config), on_cpu=other_place)
    assert build_server_command(EngineSpec("m", other, dtype), on_cpu=on_cpu)


def test_no_page_may_ask_and_nothing_is_fetched():
    argv, _ = build_server_command(EngineSpec("m"))
    assert json.loads(option(argv, "--allowed-origins")) == []
    # vLLM takes an empty list for "any", and no host has this name (RFC 2606).
    assert option(argv, "--allowed-media-domains") == "nothing.invalid"


@pytest.mark.parametrize(
    ("vllm_args", "length"),
    [(["--max-model-len", "64"], 64), (["--max_model_len=1k"], None), (["--max-model-len", "-1"], None), ([], None)],
    ids=str,
)
def test_a_context_is_read_if_it_is_a_plain_number(vllm_args, length):
    assert context_length(vllm_args) == length


@pytest.mark.parametrize(
    "vllm_args",
    [["--tensor-parallel-size", "4"], ["--tensor_parallel_size=4"], ["-tp", "4"], ["--seed", "3", "--tensor-p", "4"]],
    ids=str,
)
def test_the_number_of_ranks_is_read_as_vllm_reads_it(vllm_args):
    assert tensor_parallel_size(vllm_args) == 4 and tensor_parallel_size(["--tokenizer", "t"]) == 1
