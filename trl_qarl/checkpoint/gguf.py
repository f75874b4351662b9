"""
Writes the low-bit policy into a copy of a GGUF file of its base model, for llama.cpp and programs built on it.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Low-bit codes are not quantized again: blocks of
GGUF, each of 32 weights along the input, store them unchanged:

| container | GGUF type | a block |
|---|---|---|
| `int4-packed` | `Q4_0` | the scale in fp16, then codes + 8 |
| `int8-packed` | `Q8_0` | the scale in fp16, then codes |
| `mxfp4` | `MXFP4` | the scale's byte, then codes |

A byte of 4-bit codes holds the codes `j` and `j + 16` of a block. A scale of more than 32 weights is repeated. Other
matrices are written in the policy's dtype, and vectors in float32, as llama.cpp expects. Metadata and vocabulary are
copied from the file; chat template and special tokens are the learner's.
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from ..models import gguf_architectures
from ..packages import install_hint
from ..quantization.formats.registry import format_of
from ..quantization.inventory import Inventory
from ..quantization.names import is_adapted
from ..quantization.schemes import SCHEMES, QuantScheme
from ..quantization.tensors import LowBitTensor


if TYPE_CHECKING:
    from gguf import GGUFReader

GGUF_FILE = "model.gguf"
"""Name of the file in the folder of an export."""

_BLOCK = 32

_ARCHITECTURES = gguf_architectures()
_DENSE_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_WRITTEN = ("general.architecture", "general.file_type", "general.quantization_version")
_ROPE = "rope_"
# Numbers of llama.cpp's `llama_ftype`, which is shown when a file is listed.
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32, "MXFP4": 38}


def blocks(weight: LowBitTensor) -> torch.Tensor:
    """Return the blocks of a weight `(N, K)`, with scales that fp16 represents, as uint8 `(N, K / 32 * bytes)`."""
    scale = weight.scale.half() if weight.scale.is_floating_point() else weight.scale
    codes = weight.qdata.view(torch.uint8)
    if weight.scheme.container.num_bits == 4:
        nibbles = torch.stack([codes & 0x0F, codes >> 4], dim=-1).view(len(codes), -1, 2, _BLOCK // 2)
        codes = nibbles[:, :, 0] | (nibbles[:, :, 1] << 4)
    else:
        codes = codes.unflatten(1, (-1, _BLOCK))
    scales = scale.unsqueeze(-1).view(torch.uint8).repeat_interleave(codes.shape[1] // scale.shape[1], dim=1)
    return torch.cat([scales, codes], dim=-1).flatten(1)


def gguf_type(scheme: QuantScheme) -> str | None:
    """Return the GGUF type for the codes of a scheme; `None` if there is none, or if activations are low-bit too."""
    return format_of(scheme.container).gguf_type if scheme.is_quantized and scheme.activation is None else None


def read_base(path: str | Path) -> "GGUFReader":
    """Open the GGUF file of a base model. `ValueError` is raised if the package `gguf` is missing, the file is not
    GGUF, or the architecture is unknown."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError(f"A GGUF export needs the package gguf: {install_hint('gguf')} ({error}).") from error
    if not Path(path).is_file():
        raise ValueError(f"There is no file {str(path)!r}. Name a GGUF file of the model that was trained.")
    try:
        reader = gguf.GGUFReader(path)
    except ValueError as error:
        raise ValueError(
            f"{str(path)!r} is not a readable GGUF file ({error}). Name a GGUF file of the model that was trained."
        ) from error
    architecture = _metadata(reader, "general.architecture")
    if architecture not in _ARCHITECTURES.values():
        raise ValueError(
            f"{str(path)!r} has architecture {architecture!r}. Supported are {sorted(set(_ARCHITECTURES.values()))}, of the "
            f"model types {sorted(_ARCHITECTURES)}."
        )
    return reader


@torch.no_grad()
def export_gguf(
    model: nn.Module,
    base: "GGUFReader",
    path: Path,
    dtype: torch.dtype,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
) -> Path:
    """
    Write the low-bit policy as a GGUF file to `path`, which must not be that of `base`; return `path`.

    Metadata, vocabulary, factors of rotary embeddings and the order of tensors come from `base`, a file of the same
    base model from [`read_base`]; its weights are not read. Matrices that are not quantized are written in `dtype`.
    Chat template and special tokens are those of `processing_class`. `ValueError` is raised, and nothing written, if
    `base` is of another model or vocabulary, a scheme has no GGUF type, or fp16 cannot represent a scale.
    """
    import gguf

    inventory = Inventory.of(model)
    if is_adapted(model) and not inventory.holds_adapter:
        raise ValueError(
            "A GGUF file has no place for an adapter next to the low-bit base. Train with lora_mode='merged'."
        )
    policy = _policy_tensors(inventory)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    _check_base(base, inventory.model, policy, tokenizer)
    _check_policy(policy)
    own = {} if tokenizer is None else _tokenizer_settings(tokenizer)
    writer = gguf.GGUFWriter(path, _metadata(base, "general.architecture"))
    writer.data_alignment = base.alignment
    for field in base.fields.values():
        # Skip fields of reader and writer or about the original weights, and empty arrays, which the writer refuses.
        is_about_weights = field.name.startswith(("GGUF.", "quantize.imatrix.", "split.")) or field.name in _WRITTEN
        if not is_about_weights and field.name not in own and (value := field.contents()) != []:
            kinds = field.types
            writer.add_key_value(field.name, value, kinds[0], kinds[-1] if len(kinds) > 1 else None)
    for name, value in own.items():
        is_id = isinstance(value, int) and not isinstance(value, bool)
        kind = gguf.GGUFValueType.UINT32 if is_id else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(name, value, kind)
    matrices = Counter(
        _kind(tensor, dtype) for name, tensor in policy.items() if ".blk." in f".{name}" and tensor.ndim == 2
    )
    writer.add_file_type(_FILE_TYPES[matrices.most_common(1)[0][0]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for old in base.tensors:
        kind = old.tensor_type
        if old.name in policy:
            kind = gguf.GGMLQuantizationType[_kind(policy[old.name], dtype)]
        size = gguf.quant_shape_to_byte_shape(_shape(old), kind)
        writer.add_tensor_info(old.name, size, np.dtype(np.uint8), math.prod(size), kind)
    with closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for old in base.tensors:
            data = _bytes(policy[old.name], dtype).cpu().numpy() if old.name in policy else old.data
            writer.write_tensor_data(data)
    return path


def _policy_tensors(inventory: Inventory) -> dict[str, torch.Tensor]:
    """Return the policy's tensors by their GGUF names, with GGUF's order of rows; low-bit weights stay low-bit."""
    import gguf

    config = inventory.model.config
    architecture = _ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise ValueError(
            f"Model type {config.model_type!r} is unsupported in GGUF. Supported are {sorted(_ARCHITECTURES)}."
        )
    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[architecture], config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {}
    for layer in inventory.walk():
        low_bit = layer.quantized
        for name, tensor in layer.tensors.items():
            if name in low_bit:
                tensor = low_bit[name].low_bit_weight()
            renamed = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if renamed is None:
                raise ValueError(f"{name!r} has no name in GGUF's architecture {architecture!r}.")
            num_heads = heads.get(renamed.split(".")[-2]) if architecture == "llama" else None
            tensors[renamed] = tensor.detach() if num_heads is None else _rotated_by_pairs(tensor, num_heads)
    return tensors


def _rotated_by_pairs(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    # llama.cpp rotates neighbouring rows of q and k for Llama, transformers rows of the two halves of a head.
    rows = torch.arange(len(tensor), device=tensor.device).view(num_heads, 2, -1).transpose(1, 2).flatten()
    return tensor.take(rows) if isinstance(tensor, LowBitTensor) else tensor.detach()[rows]


def _kind(tensor: torch.Tensor, dtype: torch.dtype) -> str:
    if isinstance(tensor, LowBitTensor):
        return tensor.format.gguf_type
    return "F32" if tensor.ndim == 1 else _DENSE_TYPES[dtype]


def _bytes(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes of a tensor of the policy in GGUF's format, row by row."""
    if isinstance(tensor, LowBitTensor):
        return blocks(tensor)
    # Rounded as in the engine, even if it is then written in float32.
    rounded = tensor.to(dtype)
    return (rounded.float() if tensor.ndim == 1 else rounded).contiguous().view(torch.uint8)


def _check_base(base: "GGUFReader", model: Any, policy: dict[str, torch.Tensor], tokenizer: Any) -> None:
    """Raise `ValueError` with all differences if the file is not of the model that was trained."""
    problems = [*_different_settings(base, model.config), *_different_tensors(base, model.config, policy)]
    if tokenizer is not None:
        theirs, added = _metadata(base, "tokenizer.ggml.tokens", []), tokenizer.get_added_vocab()
        ours = {token: index for token, index in tokenizer.get_vocab().items() if token not in added}
        special = {tokenizer.eos_token, tokenizer.bos_token} & added.keys()
        ours |= {token: added[token] for token in special}
        differing = [token for token, index in ours.items() if index >= len(theirs) or theirs[index] != token]
        if differing:
            problems.append(f"{len(differing)} of {len(ours)} tokens differ, such as {differing[0]!r}")
    if problems:
        raise ValueError(
            f"The GGUF file is of another model than {model.name_or_path or type(model).__name__!r}: {'; '.join(problems)}. Name a file "
            "of the base model, complete and in one part."
        )


def _tokenizer_settings(tokenizer: Any) -> dict[str, Any]:
    """Return chat template and special tokens of a tokenizer by their names in GGUF, without those that it lacks."""
    found = {
        "tokenizer.chat_template": tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
    }
    if tokenizer.bos_token_id is not None:
        found["tokenizer.ggml.add_bos_token"] = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    return {name: value for name, value in found.items() if value is not None}


def _different_settings(base: "GGUFReader", config: Any) -> Iterator[str]:
    architecture, expected = _metadata(base, "general.architecture"), _ARCHITECTURES[config.model_type]
    if architecture != expected:
        yield f"its architecture is {architecture!r}, the model's {expected!r}"
        return
    rope = config.rope_parameters
    settings = {
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope["rope_theta"],
    }
    for key, ours in settings.items():
        # Without a base of rotations llama.cpp uses its default. Numbers in the file are float32.
        theirs = _metadata(base, f"{architecture}.{key}", 10000.0 if key == "rope.freq_base" else None)
        if theirs is not None and np.float32(theirs) != np.float32(ours):
            yield f"{architecture}.{key} is {theirs:g}, the model's {ours:g}"
    is_scaled = _metadata(base, f"{architecture}.rope.scaling.type", "none") != "none" or any(
        tensor.name.startswith(_ROPE) for tensor in base.tensors
    )
    if is_scaled != (rope.get("rope_type", "default") != "default"):
        yield f"its rotary embeddings are {'' if is_scaled else 'not '}scaled, the model's are {rope.get('rope_type')!r}"


def _different_tensors(base: "GGUFReader", config: Any, policy: dict[str, torch.Tensor]) -> Iterator[str]:
    shapes = {tensor.name: _shape(tensor) for tensor in base.tensors}
    # Without an output head llama.cpp uses the embedding.
    missing = policy.keys() - shapes.keys() - ({"output.weight"} if config.tie_word_embeddings else set())
    unknown = {name for name in shapes.keys() - policy.keys() if not name.startswith(_ROPE)}
    for names, words in ((missing, "it lacks"), (unknown, "the model lacks")):
        if names:
            yield f"{words} {len(names)} tensors, such as {min(names)!r}"
    for name, tensor in policy.items():
        if shapes.get(name, tuple(tensor.shape)) != tuple(tensor.shape):
            yield f"{name} is {shapes[name]}, the model's {tuple(tensor.shape)}"
            return


def _check_policy(policy: dict[str, torch.Tensor]) -> None:
    """Raise `ValueError` for low-bit weights that no GGUF type can store."""
    weights = {name: tensor for name, tensor in policy.items() if isinstance(tensor, LowBitTensor)}
    for name, weight in weights.items():
        scheme = weight.scheme
        if gguf_type(scheme) is None:
            fitting = [s.name for s in SCHEMES.values() if gguf_type(s) is not None]
            raise ValueError(f"{name}: scheme {scheme.name!r} has no GGUF type. Schemes with a type are {fitting}.")
        if weight.shape[1] % _BLOCK:
            raise ValueError(
                f"{name} has {weight.shape[1]} input features, and blocks of GGUF have {_BLOCK}. Leave the layer out with `exclude_modules`."
            )
    lost, dtype = [], None
    for name, weight in weights.items():
        scale = weight.scale
        if scale.is_floating_point() and (count := (scale.half().double() != scale.double()).sum().item()):
            lost.append(f"{name}: {count:,} of {scale.numel():,}")
            dtype = str(scale.dtype).removeprefix("torch.")
    if lost:
        raise ValueError(
            f"GGUF has scales in fp16, which cannot represent all scales of {len(lost)} tensors in {dtype} ({', '.join(lost[:3])}"
            f"{', ...' if len(lost) > 3 else ''}). Train and export in bfloat16: fp16 can represent its scales from 7.6e-06 to 65504."
        )


def _metadata(base: "GGUFReader", key: str, default: Any = None) -> Any:
    field = base.get_field(key)
    return default if field is None else field.contents()


def _shape(tensor: Any) -> tuple[int, ...]:
    # A file has the sizes in reverse.
    return tuple(int(size) for size in reversed(tensor.shape))
