"""Quantized releases of a model, in the layout of those that quantize for publication, with scales by another rule."""

import json
from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def write_release(model, folder, preset="W4A16", group_size=None, ignore=("lm_head",)) -> Path:
    """Write `model` as compressed-tensors does for a preset. Scales are 0.6 to 1.4 times those of its observers: like
    scales from calibration or training, they cut large weights off, or leave the largest codes unused."""
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if group_size is not None:
        groups = {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
        scheme.weights = QuantizationArgs(num_bits=scheme.weights.num_bits, **groups)
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=list(ignore)))
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            scale = module.weight_scale.data
            largest = module.weight.detach().float().unflatten(-1, (scale.shape[-1], -1)).abs().amax(-1)
            half = 448.0 if scheme.weights.type == "float" else (2**scheme.weights.num_bits - 1) / 2
            scale.copy_(largest / half * (0.6 + 0.8 * torch.rand(scale.shape, generator=generator)))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return Path(folder)


def make_release(model_path, folder, preset="W4A16", group_size=32, **options) -> str:
    """Write a release of a model on disk, with its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    AutoTokenizer.from_pretrained(model_path).save_pretrained(folder)
    return str(write_release(model, folder, preset, group_size, **options))


def as_gptq(release: Path, folder, bits=4, group_size=32) -> Path:
    """Rewrite a release in INT4 or INT8 as GPTQModel's: columns of words, zero points, and the group of each input
    feature."""
    folder = Path(folder)
    folder.mkdir()
    config = json.loads((release / "config.json").read_text()) | {"dtype": "float16"}
    described = {"quant_method": "gptq", "checkpoint_format": "gptq", "desc_act": False, "sym": True}
    config["quantization_config"] = described | {"bits": bits, "group_size": group_size}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, tensor in load_file(release / "model.safetensors").items():
        layer, _, leaf = name.rpartition(".")
        if leaf == "weight_packed":
            tensors[f"{layer}.qweight"] = tensor.t().contiguous()
        elif leaf == "weight_scale":
            tensors[f"{layer}.scales"] = tensor.t().contiguous()
            rows, groups = tensor.shape
            # Zero points are stored without 1.
            zero = 0x77777777 if bits == 4 else 0x7F7F7F7F
            tensors[f"{layer}.qzeros"] = torch.full((groups, rows * bits // 32), zero, dtype=torch.int32)
        elif leaf == "weight_shape":
            columns = tensor[1].item()
            size = columns if group_size == -1 else group_size
            tensors[f"{layer}.g_idx"] = torch.arange(columns, dtype=torch.int32) // size
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
