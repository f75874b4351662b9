"""A policy in a GGUF file, read by gguf and by transformers, under names and in an order written down here."""

import re
import sys
from contextlib import closing

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from testing_utils import make_tiny_config, make_tiny_tokenizer, refused, run_export
from testing_utils.layers import assert_close
from trl_qarl.checkpoint.export import export_checkpoint
from trl_qarl.checkpoint.gguf import blocks, export_gguf, read_base
from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.quantization.swap import prepare_model, quantized_layers
from trl_qarl.quantization.tensors import LowBitTensor


gguf = pytest.importorskip("gguf")

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
}


def name_in_gguf(name):
    name = name.replace("model.layers.", "blk.")
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def make_model(arch="llama", **overrides):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_tiny_config(arch, **overrides), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=float(name.endswith("norm.weight")), std=0.1)
    return model


def make_base(path, model, metadata=(), without=(), **tensors):
    """A GGUF file of the model with other weights, all of them ones; `metadata` and `tensors` replace or add some."""
    config = model.config
    arch = config.model_type
    writer = gguf.GGUFWriter(path, dict(metadata).get("general.architecture", arch))
    numbers = {
        "block_count": config.num_hidden_layers,
        "context_length": 512,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "rope.dimension_count": 64,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    values = {f"{arch}.{key}": value for key, value in numbers.items()} | {
        "general.file_type": 1,
        "quantize.imatrix.file": "of other weights",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": sorted(vocab := make_tiny_tokenizer().get_vocab(), key=vocab.get),
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }
    for key, value in (values | dict(metadata)).items():
        if key != "general.architecture" and value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    given = {name_in_gguf(n): np.ones(tuple(p.shape), np.float16) for n, p in model.state_dict().items()}
    tied = {"output.weight"} if config.tie_word_embeddings else set()
    for name, tensor in (given | tensors).items():
        if name not in {*tied, *without}:
            writer.add_tensor(name, tensor)
    with closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    return read_base(path)


def in_transformers_order(rows, num_heads):
    """Rows of q or k of a Llama file, in which a head's two halves alternate."""
    size = len(rows) // num_heads
    heads = [rows[size * head : size * (head + 1)] for head in range(num_heads)]
    return torch.cat([torch.cat([head[0::2], head[1::2]]) for head in heads])


def read_weights(path, model):
    """Every weight in a file by its name in transformers, dequantized by the gguf package."""
    config, weights = model.config, {}
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name in model.state_dict():
        if (tensor := found.get(name_in_gguf(name))) is None:
            assert name == "lm_head.weight" and config.tie_word_embeddings
            continue
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if config.model_type == "llama" and "q_proj" in name:
            weight = in_transformers_order(weight, config.num_attention_heads)
        if config.model_type == "llama" and "k_proj" in name:
            weight = in_transformers_order(weight, config.num_key_value_heads)
        weights[name] = weight, tensor.tensor_type.name
    return weights


@pytest.mark.parametrize(
    ("scheme", "group_size", "kind"),
    [("w4a16", 32, "Q4_0"), ("w2a16", 128, "Q4_0"), ("w8a16", None, "Q8_0"), ("mxfp4a16", None, "MXFP4")],
)
def test_blocks_are_read_as_the_weight_exactly(scheme, group_size, kind):
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        master = torch.randn(6, 256, generator=generator) * torch.logspace(-2, 2, 6).unsqueeze(1)
        master[1, :128], master[2] = 0, 0
        master[3, 5:9] = torch.tensor([1.0, -1.0, 40.0, -40.0])
        weight = LowBitTensor.from_hp(master, get_scheme(scheme, group_size), torch.bfloat16)
        data = blocks(weight).numpy()
        read = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
        assert torch.equal(torch.from_numpy(read), weight.dequantize(torch.float32))


@pytest.mark.parametrize(
    ("arch", "scheme", "group_size", "kind", "tied"),
    [
        ("llama", "w4a16", 32, "Q4_0", True),
        ("llama", "w8a16", None, "Q8_0", False),
        ("qwen2", "w4a16", 128, "Q4_0", False),
        ("qwen2", "mxfp4a16", None, "MXFP4", True),
        ("qwen3", "w3a16", 64, "Q4_0", True),
        ("llama", "bf16", None, "BF16", False),
    ],
)
def test_the_file_has_the_policys_weights_and_the_bases_rest(tmp_path, arch, scheme, group_size, kind, tied):
    model = make_model(
        arch, tie_word_embeddings=tied, num_attention_heads=4, num_key_value_heads=2, attention_bias=True
    )
    base = make_base(tmp_path / "base.gguf", model)
    prepare_model(model, get_scheme(scheme, group_size), scale_dtype=torch.bfloat16)
    path = export_gguf(model, base, tmp_path / "out.gguf", torch.bfloat16, make_tiny_tokenizer())
    weights, layers = read_weights(path, model), quantized_layers(model)
    assert layers or scheme == "bf16"
    for name, (weight, found) in weights.items():
        layer, dot, leaf = name.rpartition(".")
        master = model.state_dict()[name]
        if layer in layers and leaf == "weight":
            assert found == kind, name
            assert torch.equal(weight, layers[layer].low_bit_weight().dequantize(torch.float32)), name
        else:
            assert found == ("F32" if master.ndim == 1 else "BF16")
            assert torch.equal(weight, master.bfloat16().float()), name
    ours, theirs = ({n: f.contents() for n, f in r.fields.items()} for r in (gguf.GGUFReader(path), base))
    changed = {"general.file_type", "general.quantization_version", "quantize.imatrix.file", "GGUF.kv_count"}
    changed |= {"tokenizer.chat_template", "tokenizer.ggml.padding_token_id"}
    assert {n: v for n, v in ours.items() if n not in changed} == {n: v for n, v in theirs.items() if n not in changed}
    assert ours["general.file_type"] == gguf.LlamaFileType[f"MOSTLY_{kind}" + "_MOE" * (kind == "MXFP4")]
    assert "quantize.imatrix.file" not in ours


@pytest.mark.parametrize(("arch", "tied"), [("llama", True), ("qwen2", False)])
def test_transformers_reads_the_learners_logits_from_gguf(tmp_path, arch, tied):
    model = make_model(arch, tie_word_embeddings=tied, num_key_value_heads=2)
    base = make_base(tmp_path / "base.gguf", model)
    prepare_model(model, "w4a16", scale_dtype=torch.bfloat16)
    export_gguf(model, base, tmp_path / "out.gguf", torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="out.gguf", dtype=torch.float32)
    assert_close(loaded, model)


def test_rotary_factors_stay_and_both_tied_copies_are_trained(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = scaling | {"original_max_position_embeddings": 256, "rope_theta": 10000.0}
    model = make_model(tie_word_embeddings=True, rope_parameters=rope)
    factors = np.linspace(1, 8, 32, dtype=np.float32)
    model.config.tie_word_embeddings = False
    make_base(tmp_path / "base.gguf", model, **{"rope_freqs.weight": factors})
    model.config.tie_word_embeddings = True
    prepare_model(model, "w4a16", scale_dtype=torch.bfloat16)
    export_gguf(model, read_base(tmp_path / "base.gguf"), tmp_path / "out.gguf", torch.bfloat16)
    found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert np.array_equal(found["rope_freqs.weight"], factors)
    assert np.array_equal(found["output.weight"], found["token_embd.weight"])
    with pytest.raises(ValueError, match="'llama3'"):
        base = make_base(tmp_path / "base.gguf", model)
        export_gguf(model, base, tmp_path / "out.gguf", torch.bfloat16)


def _tokens_without(token):
    vocabulary = make_tiny_tokenizer().get_vocab()
    return [known if known != token else "<|other|>" for known in sorted(vocabulary, key=vocabulary.get)]


BAD_BASES = {
    "another base of rotations": ({"metadata": {"llama.rope.freq_base": 5e5}}, "rope.freq_base is 500000"),
    "another architecture": ({"metadata": {"general.architecture": "qwen2"}}, "architecture is 'qwen2'"),
    "another end token": ({"metadata": {"tokenizer.ggml.tokens": _tokens_without("<|im_end|>")}}, "tokens differ"),
    "no vocabulary": ({"metadata": {"tokenizer.ggml.tokens": None}}, "tokens differ"),
    "a tensor too few": ({"without": ["blk.1.ffn_up.weight"]}, "'blk.1.ffn_up.weight'"),
    "a tensor too many": ({"blk.0.attn_q.bias": np.ones(128, np.float32)}, "'blk.0.attn_q.bias'"),
    "another shape": ({"token_embd.weight": np.ones((99, 128), np.float16)}, r"\(99, 128\)"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_BASES.values(), ids=BAD_BASES)
def test_a_file_of_another_model_is_refused(tmp_path, arguments, message):
    model = make_model()
    base = make_base(tmp_path / "base.gguf", model, **arguments)
    prepare_model(model, "w4a16", scale_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=rf"another model.*{message}"):
        export_gguf(model, base, tmp_path / "out.gguf", torch.bfloat16, make_tiny_tokenizer())
    assert not [*tmp_path.glob("out*")]


def test_a_scheme_that_gguf_has_no_type_for_is_refused(tmp_path):
    model = make_model()
    base = make_base(tmp_path / "base.gguf", model)
    prepare_model(model, "nvfp4a16", scale_dtype=torch.bfloat16)
    known = re.escape("['w4a16', 'w8a16', 'mxfp4a16', 'w3a16', 'w2a16']")
    with pytest.raises(ValueError, match=f"blk.0.attn_q.weight: scheme 'nvfp4a16' .*{known}"):
        export_gguf(model, base, tmp_path / "out.gguf", torch.bfloat16)


def test_scales_beyond_fp16_leave_an_earlier_export(tmp_path):
    model = make_model()
    base = make_base(tmp_path / "base.gguf", model)
    prepare_model(model, get_scheme("w4a16", 32), scale_dtype=torch.bfloat16)
    folder = export_checkpoint(model, tmp_path / "out", dtype=torch.bfloat16, gguf=base)
    before = (folder / "model.gguf").read_bytes()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[7, :32].mul_(1e-7)
        model.model.layers[1].mlp.down_proj.weight[2:4].mul_(1e9)
    counts = r"blk.0.ffn_up.weight: 1 of 1,024, blk.1.ffn_down.weight: 16 of 1,024"
    with pytest.raises(ValueError, match=rf"cannot represent all scales of 2 tensors in bfloat16 \({counts}\)"):
        export_checkpoint(model, folder, dtype=torch.bfloat16, gguf=base)
    assert (folder / "model.gguf").read_bytes() == before
    export_checkpoint(model, folder, dtype=torch.bfloat16)
    assert not (folder / "model.gguf").exists(), "it is another policy's"


def test_what_is_no_gguf_file_of_a_known_architecture_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "base.gguf"
    with pytest.raises(ValueError, match="There is no file"):
        read_base(path)
    path.write_bytes(b"no model at all" * 99)
    with pytest.raises(ValueError, match="not a readable GGUF file"):
        read_base(path)
    with pytest.raises(ValueError, match=r"'gpt2'. Supported are \['llama',"):
        make_base(path, make_model(), {"general.architecture": "gpt2"})
    gemma = make_model("gemma")
    with pytest.raises(ValueError, match="'gemma'"):
        export_gguf(gemma, make_base(path, make_model()), tmp_path / "out.gguf", torch.bfloat16)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=re.escape('pip install ".[gguf]"')):
        read_base(path)


def test_the_command_writes_weights_template_and_end(tmp_path, capsys):
    model, tokenizer = make_model(), make_tiny_tokenizer()
    metadata = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.chat_template": "{{ messages }}"}
    make_base(tmp_path / "base.gguf", model, metadata)
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "masters")
    folders = tmp_path / "masters", tmp_path / "out"
    assert run_export(*folders, "--scheme", "w4a16", "--gguf", str(tmp_path / "base.gguf")) == 0
    assert f"For llama.cpp: llama-server -m {tmp_path}/out/model.gguf" in capsys.readouterr().out
    assert (tmp_path / "out" / "model.safetensors").is_file()
    prepare_model(model, "w4a16", scale_dtype=torch.bfloat16)
    weight, _ = read_weights(tmp_path / "out" / "model.gguf", model)["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(weight, model.model.layers[1].mlp.up_proj.low_bit_weight().dequantize(torch.float32))
    found = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields.items()}
    assert found["tokenizer.chat_template"] == tokenizer.chat_template
    assert found["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id == 2
    argv = ["--model_name_or_path", str(folders[0]), "--output_dir", str(folders[1]), "--scheme", "w4a16", "--gguf"]
    assert "There is no file" in refused(capsys, "export", *argv, str(tmp_path / "none.gguf"))


def test_only_an_adapter_inside_the_base_is_written(tmp_path):
    peft = pytest.importorskip("peft")
    from trl_qarl.adapters.base import prepare_base

    base = make_base(tmp_path / "base.gguf", make_model())
    for is_merged in (False, True):
        model = peft.get_peft_model(make_model(), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
        prepare_base(model, "w4a16", scale_dtype=torch.bfloat16, keep_masters=False, is_merged=is_merged)
        if not is_merged:
            with pytest.raises(ValueError, match="lora_mode='merged'"):
                export_gguf(model, base, tmp_path / "out.gguf", torch.bfloat16)
            continue
        path = export_gguf(model, base, tmp_path / "out.gguf", torch.bfloat16)
        weight, _ = read_weights(path, make_model())["model.layers.0.self_attn.q_proj.weight"]
        layer = quantized_layers(model)["model.layers.0.self_attn.q_proj"]
        assert torch.equal(weight, layer.low_bit_weight().dequantize(torch.float32))
