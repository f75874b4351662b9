"""
Writes the current low-bit policy as a compressed-tensors checkpoint, which transformers and vLLM load.

Format: https://github.com/vllm-project/compressed-tensors. The tensors equal those of the learner's forward, bit for
bit; tensors that are not quantized are written in the dtype in which the engine runs the model.
"""

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import GENERATION_CONFIG_NAME
from typing_extensions import override

from ..hub import ADAPTER_FOLDER, write_card
from ..models import family_of, fields_for_vllm
from ..quantization.inventory import Inventory
from ..quantization.names import architecture, is_adapted, shares_head
from ..quantization.storage import is_sharded, whole
from .files import allow_as_umask, check_writable, name_disk_errors
from .gguf import GGUF_FILE, export_gguf
from .layout import check_finite, iter_checkpoint_tensors, loads_in_transformers, quantization_config
from .load import auto_class


if TYPE_CHECKING:
    from gguf import GGUFReader

logger = logging.getLogger(__name__)

# Distinguishes exports, which may be overwritten, from masters, for every scheme.
_EXPORT_METADATA = {"exported_by": "trl_qarl"}
_PARTIAL = ".partial"


def export_checkpoint(
    model: PreTrainedModel,
    output_dir: str | Path,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: str | int = "5GB",
    card: dict[str, Any] | None = None,
    gguf: "GGUFReader | None" = None,
) -> Path:
    """
    Write the low-bit policy: safetensors shards, configuration with the quantization described, generation
    configuration, tokenizer or processor, and a README.md that says how to serve it.

    - `model`: prepared by [`prepare_model`] or converted by [`convert_model`]; a model without quantized layers is
      written as an ordinary checkpoint. For a `PeftModel` the base is written, and the adapter to a subfolder
      `adapter` in PEFT's format, unless the low-bit weights include it (`lora_mode="merged"`).
    - `output_dir`: folder to write; created if missing.
    - `processing_class`: saved next to the weights.
    - `dtype`: dtype of tensors that are not quantized; by default the dtype for which the scales of prepared layers
      are rounded, else the model's.
    - `max_shard_size`: largest size of one shard.
    - `card`: further content of README.md: arguments of [`~trl_qarl.hub.write_card`].
    - `gguf`: file of the base model, from [`~trl_qarl.checkpoint.gguf.read_base`]: the policy is also written into a
      copy of this file, `model.gguf`, with the errors of [`~trl_qarl.checkpoint.gguf.export_gguf`].

    Return the folder. An earlier export in it is replaced once the new one is complete. Of several processes the first
    writes, and if masters are sharded, which are gathered layer by layer, every process has to call.

    `TypeError` is raised if `model` is not a model; `ValueError` if `output_dir` holds another model's weights, or if
    the model has both quantized layers and experts in high precision.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"`model` must be a model prepared by `prepare_model`, such as `trainer.model`, got {type(model).__name__}. Export a "
            "trainer's policy with `trainer.export_model()`, and masters on disk with `trl-qarl export --model_name_or_path DIR "
            "--output_dir OUT`."
        )
    output_dir, inventory, is_shared = Path(output_dir), Inventory.of(model), is_sharded(model)
    base, formats = inventory.model, inventory.formats
    adapted = model if is_adapted(model) and not inventory.holds_adapter else None
    scheme = "-".join(dict.fromkeys(scheme.name for scheme, _ in formats.values())) or "bf16"
    if adapted is base:
        raise ValueError("The model has an adapter, which only PEFT can save. Pass the `PeftModel` that contains it.")
    if getattr(base, "is_loaded_in_4bit", False):
        raise ValueError(
            "The base is a 4-bit model of bitsandbytes, which has no export: `save_model` writes the adapter, and PEFT loads it on "
            "the same base."
        )
    if formats and inventory.stacked_experts:
        raise ValueError(
            f"{type(base).__name__} has experts in high precision and layers in {scheme!r}. vLLM and transformers expect such "
            "experts under different names, so no checkpoint serves both. Save the masters with `save_model`, or train with "
            "scheme='bf16'."
        )
    if is_shared and gguf is not None:
        raise ValueError("The masters are sharded. Save them, and run `trl-qarl export --gguf` in one process.")
    is_other = dist.is_initialized() and dist.get_rank() > 0
    if is_other and not is_shared:
        return output_dir
    check_export_dir(output_dir)
    is_replaced, described = is_export(output_dir), quantization_config(inventory)

    if dtype is None:
        dtype = next((layer.scale_dtype for layer in inventory.layers.values()), base.dtype)
    adapter = {} if adapted is None else adapted.state_dict()
    adapter = {name: whole(tensor, to_main=True) for name, tensor in adapter.items() if ".lora_" in name}
    if is_other:
        for _ in iter_checkpoint_tensors(base, dtype):
            pass
        return output_dir
    tensors = checkpoint_state_dict(base, dtype)

    if left_out := family_of(architecture(base)).problem_of_plain_vllm:
        logger.warning(
            "%s: vLLM 0.31's class leaves out %s, and computes another policy, unless trl_qarl is installed next to it.",
            architecture(base),
            left_out,
        )
    with written_as_a_whole(output_dir) as folder:
        if gguf is not None:
            export_gguf(base, gguf, folder / GGUF_FILE, dtype, processing_class)
        save_configuration(base, folder, dtype, processing_class, described)
        metadata = {"format": "pt", **_EXPORT_METADATA}
        save_torch_state_dict(tensors, folder, max_shard_size=max_shard_size, metadata=metadata)
        _sort_metadata(folder)
        if adapted is not None:
            # TRL may have added a copy of the initial adapter.
            adapted.save_pretrained(folder / ADAPTER_FOLDER, selected_adapters=["default"], state_dict=adapter)
        about: dict[str, Any] = {"name": output_dir.resolve().name, "source": base.name_or_path}
        about |= {name: value for name, value in (card or {}).items() if value is not None}
        about["loaded_by"] = auto_class(base.config).__name__
        about["trust_remote_code"] = has_own_code(base)
        about["loads_in_transformers"] = loads_in_transformers(inventory)
        write_card(folder, scheme=scheme, dtype=str(dtype).removeprefix("torch."), **about)
        if is_replaced:
            # The adapter of the earlier export belongs to another base.
            shutil.rmtree(output_dir / ADAPTER_FOLDER, ignore_errors=True)
    return output_dir


def _sort_metadata(folder: Path) -> None:
    """Sort the metadata of weight files, which safetensors writes in any order, so that equal weights are equal
    bytes."""
    for path in folder.glob("*.safetensors"):
        with path.open("r+b") as file:
            size, header = read_header(file)
            header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
            data = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
            if len(data) <= size:
                file.seek(8)
                file.write(data.ljust(size))


def save_configuration(
    model: PreTrainedModel,
    folder: Path,
    dtype: torch.dtype,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    described: dict[str, Any] | None = None,
) -> None:
    """Write what a reader needs next to the weights: the model's configuration with its class, `dtype` and the
    quantization, the code of its class if that is not transformers', generation configuration, and tokenizer or
    processor."""
    if not is_sharded(model):
        keep_ties(model)
    config = deepcopy(model.config)
    config.architectures, config.dtype = [architecture(model)], dtype
    text = config.get_text_config()
    for name, value in fields_for_vllm(architecture(model), text).items():
        setattr(text, name, value)
    if described:
        config.quantization_config = described
    if has_own_code(model):
        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate():
        # Not by its own method, which refuses invalid ones, although transformers loads them.
        path = folder / GENERATION_CONFIG_NAME
        model.generation_config.to_json_file(path, use_diff=True, keys_to_pop=["compile_config"])
    if processing_class is not None:
        processing_class.save_pretrained(folder)


def keep_ties(model: PreTrainedModel) -> None:
    """Have the configuration say, in place, whether embedding and output head are one weight: a user may have tied or
    untied them, and readers of a checkpoint go by the configuration."""
    ties = shares_head(model)
    if bool(model.config.tie_word_embeddings) is not ties:
        model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = ties


def has_own_code(model: PreTrainedModel) -> bool:
    """Return whether the model's class comes from a file next to its weights (`trust_remote_code`)."""
    return getattr(model, "_auto_class", None) is not None


class _AnyGenerationConfig(GenerationConfig):
    @override
    def validate(self, strict: bool = False, user_set_attributes: set[str] | None = None) -> None:
        """Does not refuse to be saved."""
        super().validate(user_set_attributes=user_set_attributes)


def keep_generation_config(model: nn.Module) -> None:
    """Have checkpoints contain the model's generation configuration even if it is invalid, such as `temperature`
    without `do_sample`: transformers loads it, and refuses to save a model with it."""
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    try:
        config.validate(strict=True)
    except ValueError as error:
        logger.warning("The model's generation_config is invalid, and saved unchanged: %s", error)
        model.generation_config = _AnyGenerationConfig.from_dict(config.to_dict())


def read_header(file: BinaryIO) -> tuple[int, dict[str, Any]]:
    """Read the header of a safetensors file; return its size in bytes and its content. The data follow in `file`."""
    size = int.from_bytes(file.read(8), "little")
    return size, json.loads(file.read(size))


@contextmanager
def written_as_a_whole(folder: Path) -> Iterator[Path]:
    """Yield a folder whose files are moved to `folder` at the end. A failure leaves an earlier export unchanged."""
    partial = folder / _PARTIAL
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with name_disk_errors(folder):
            yield partial
        allow_as_umask([path for path in partial.rglob("*") if path.is_file()])
        # The new export may have fewer shards and no GGUF file.
        for path in (*folder.glob("*.safetensors*"), folder / GGUF_FILE):
            path.unlink(missing_ok=True)
        for path in partial.iterdir():
            if path.is_dir():
                shutil.rmtree(folder / path.name, ignore_errors=True)
            os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_export_dir(folder: str | Path) -> None:
    """Raise `ValueError` for a folder that cannot be written, or holds weights other than an earlier export."""
    check_writable(folder)
    if any(Path(folder).glob("*.safetensors")) and not is_export(Path(folder)):
        raise ValueError(
            f"{str(folder)!r} holds other weights, perhaps the masters, from which training resumes. Export to an empty folder."
        )


def checkpoint_state_dict(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return [`~trl_qarl.checkpoint.layout.iter_checkpoint_tensors`] as contiguous tensors on the CPU. `ValueError` is
    raised if one is not finite."""
    tensors = {name: tensor.cpu().contiguous() for name, tensor in iter_checkpoint_tensors(model, dtype)}
    check_finite(tensors.items())
    inventory = Inventory.of(model)
    if not inventory.stacked_experts.keys() <= inventory.names.experts.keys():
        # Only transformers knows the checkpoint names of other layouts.
        tensors = revert_weight_conversion(model, tensors)
    # Matrices of experts are views into one tensor for the whole layer.
    return {name: t if t.nbytes == t.untyped_storage().nbytes() else t.clone() for name, t in tensors.items()}


def is_export(folder: Path) -> bool:
    """Return whether all weights in a folder were written by [`export_checkpoint`]."""
    # A later `save_pretrained` may leave either file behind, so every existing one must have our metadata.
    found = []
    weights, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if weights.is_file():
        with safe_open(weights, "pt") as file:
            found.append(file.metadata() or {})
    if index.is_file():
        found.append(json.loads(index.read_text())["metadata"])
    return bool(found) and all(_EXPORT_METADATA.items() <= metadata.items() for metadata in found)
