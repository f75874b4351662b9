import gc
import re
import shlex

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from testing_utils import make_tiny_model, make_trainer, set_engine_environment
from trl_qarl import QaRLConfig, export_checkpoint, load_engine, prepare_model
from trl_qarl.checkpoint.layout import quantization_config
from trl_qarl.doctor.memory import shapes_of
from trl_qarl.engines.server import start_command
from trl_qarl.engines.server_process import free_port
from trl_qarl.engines.spec import EngineSpec
from trl_qarl.quantization.inventory import Inventory
from trl_qarl.scripts import vllm_serve


def export(directory, scheme, dtype=torch.float32):
    """A prepared model and its export."""
    path = make_tiny_model(directory, "qwen2")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prepare_model(model, scheme, scale_dtype=dtype)
    return model, export_checkpoint(model, directory / scheme, AutoTokenizer.from_pretrained(path), dtype)


def test_a_missing_server_is_named_with_its_command(tmp_path):
    pytest.importorskip("vllm", reason="TRL asks for it")
    port = free_port()
    options = {"scheme": "w4a16", "group_size": 64, "exclude_modules": ["o_proj"], "bf16": False}
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_host": "127.0.0.1", "vllm_server_port": port}
    model = make_tiny_model(tmp_path)
    with pytest.raises(ConnectionError, match="Connection refused") as error:
        make_trainer(model, tmp_path / "out", **options, **server, vllm_server_timeout=0.1)
    command = re.search(r"Start one with `trl-qarl vllm-serve ([^`]*)`", str(error.value))[1]
    parsed = vars(vllm_serve.make_parser("vllm-serve").parse_args(shlex.split(command)))
    expected = {"model": model, "port": port, "dtype": "float32", "max_lora_rank": None, "exclude_modules": ["o_proj"]}
    assert parsed | expected | {"scheme": "w4a16", "group_size": 64} == parsed


def test_a_plans_command_serves_the_learners_layers(tmp_path):
    path = make_tiny_model(tmp_path, num_hidden_layers=3)
    scheme = {"re:.*mlp.*": "w4a16", "re:.*o_proj": None, "_default": "w8a8"}
    options = {"scheme": scheme, "group_size": 64, "use_cpu": True, "bf16": False}
    args = QaRLConfig(
        str(tmp_path / "out"), exclude_modules=["layers.2.mlp.down_proj", "re:model[.]layers[.]0[.].*"], **options
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prepare_model(model, args.plan, exclude_modules=args.exclude_modules, scale_dtype=torch.float32)
    _, _, *argv = shlex.split(start_command(args, EngineSpec.of(model, torch.float32)))
    given = vllm_serve.make_parser("vllm-serve").parse_args(argv)
    config = vllm_serve._quantization_config(given, shapes_of(given.model, False, "--model"))
    assert config == quantization_config(Inventory.of(model)) and config["format"] == "mixed-precision"
    groups = [(group["format"], group["weights"].get("group_size")) for group in config["config_groups"].values()]
    assert groups == [("int-quantized", None), ("pack-quantized", 64)]


@pytest.mark.vllm
@pytest.mark.slow
# vLLM would compile its sampler, for seconds.
@torch.compiler.set_stance("force_eager")
def test_an_engine_that_was_dropped_does_not_end_the_next_one(tmp_path, monkeypatch):
    """Whenever it is collected: vLLM exempts what an engine's start finds, and the end of any engine undoes that."""
    from vllm import SamplingParams

    set_engine_environment(monkeypatch)
    _, folder = export(tmp_path, "w4a16")
    engine = load_engine(folder, max_model_len=64, max_num_seqs=4)
    # A circle, as a trainer is in, of what was there when the engine started.
    engine.itself = engine
    del engine
    engine = load_engine(folder, max_model_len=64, max_num_seqs=4)
    gc.unfreeze()
    gc.collect()
    (answer,) = engine.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=2), use_tqdm=False)
    assert answer.outputs[0].token_ids


def test_a_folder_that_holds_no_export_is_refused(tmp_path):
    masters = make_tiny_model(tmp_path)
    for folder in (masters, tmp_path / "nowhere", tmp_path):
        with pytest.raises(ValueError, match="holds no export of trl_qarl. .*trl-qarl export"):
            load_engine(folder)


def test_a_scheme_that_vllm_cannot_run_here_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="scheme='w4a8'"):
        load_engine(export(tmp_path, "w4a8", torch.bfloat16)[1])
