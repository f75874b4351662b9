"""Coarser grids and several schemes in one model: training with vLLM, export, and what other programs read of it."""

import json
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from testing_utils import logged, make_vllm_trainer
from testing_utils.trainings import bands
from trl_qarl import load_engine
from trl_qarl.bitwise import cpu as kernels
from trl_qarl.checkpoint.load import load_frozen_model
from trl_qarl.engines.in_process import InProcessEngine
from trl_qarl.quantization.swap import quantized_layers


pytestmark = [
    pytest.mark.usefixtures("quick_engines"),
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not kernels.has_engine_kernels(), reason=str(kernels.reason_against())),
]

PROMPTS = [[4, 90, 11, 57, 200, 31], [7, 8, 9]]
CASES = {
    "three bits in INT4": ({"scheme": "w3a16", "group_size": 64}, {"w3a16": 14}),
    # One batch at 4 bits, one at 3; then 4 again.
    "signed scales": ({"scheme": "w4a16", "group_size": 32, "precisions": [4, 3]}, {"w4a16": 14}),
    "powers of two below FP4": ({"scheme": "mxfp4a16"}, {"mxfp4a16": 14}),
    "E4M3 below FP4": ({"scheme": "nvfp4a16"}, {"nvfp4a16": 14}),
    # Of two layers the first stays in bf16.
    "INT4 MLPs, INT8 attention": (
        {
            "scheme": {"re:.*mlp.*": {"scheme": "w4a16", "group_size": 32}, "re:.*self_attn.*": "w8a8"},
            "exclude_modules": ["re:model[.]layers[.]0[.].*"],
        },
        {"w4a16": 3, "w8a8": 4},
    ),
    # No last component tells the groups apart, so an export names each layer.
    "INT8 below three bits": (
        {"scheme": {"re:.*layers.0.*": "w8a8", "_default": {"scheme": "w3a16", "group_size": 32}}},
        {"w8a8": 7, "w3a16": 7},
    ),
}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Three bits are also in "INT8 below three bits".
        pytest.param(*case, id=name, marks=pytest.mark.nightly if name == "three bits in INT4" else ())
        for name, case in CASES.items()
    ],
)
def test_a_policy_trains_exactly_and_its_export_agrees(tmp_path, options, expected):
    options = options | bands(1.0)
    trainer = make_vllm_trainer(
        tmp_path, "qwen3", vllm_mode="colocate", bf16=True, numerics="exact", learning_rate=1e-2, **options
    )
    layers = quantized_layers(trainer.model)
    assert Counter(layer.scheme.name for layer in layers.values()) == expected
    trainer.train()
    assert logged(trainer, "mismatch/abs_logp_max") == [0.0, 0.0]
    assert logged(trainer, "quant/bits") == options.get("precisions", [])
    assert min(logged(trainer, "quant/code_flip_rate")) > 0 and min(logged(trainer, "publish/tensors")) > 0
    trainer.vllm_generation.sync_weights()
    published = [trainer.vllm_generation.engine.score(prompt) for prompt in PROMPTS]

    folder = trainer.export_model(tmp_path / "export")
    weights = {name: layer.low_bit_weight() for name, layer in layers.items()}
    for name, weight in weights.items():
        assert (weight.scale_values() < 0).any() == layers[name].scheme.grid.has_signed_scales
    for group in json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"].values():
        assert group["weights"]["num_bits"] in (4, 8)
    # transformers, through compressed-tensors, has the dense weights of codes and scales.
    dense = CompressedTensorsConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=dense)
    for name, weight in weights.items():
        assert torch.equal(loaded.get_submodule(name).weight, weight.dequantize(torch.float32)), name
    # Our own loading has codes, scales and schemes.
    for name, layer in quantized_layers(load_frozen_model(str(folder))).items():
        read = layer.low_bit_weight()
        assert layer.scheme.name == layers[name].scheme.name and layer.group_size == layers[name].group_size
        assert torch.equal(read.qdata.view(torch.uint8), weights[name].qdata.view(torch.uint8))
        assert torch.equal(read.dequantize(torch.float32), weights[name].dequantize(torch.float32))
        scale = read.scale_values(torch.float64)
        levels = read.dequantize(torch.float64).view(*scale.shape, -1) / scale.unsqueeze(-1)
        assert len(levels.unique()) <= 2**layer.scheme.grid.num_bits
    # vLLM answers with the export as it did in training, bit for bit.
    engine = load_engine(folder, max_model_len=64, max_num_seqs=4)
    assert [InProcessEngine(engine).score(prompt) for prompt in PROMPTS] == published
