"""`qarl_scales.safetensors`, the fixed scales next to masters that started from a quantized checkpoint."""

import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers.utils import cached_file

from ..quantization.fixed_scales import FixedScale, fix_scales, fixed_scales


SCALES_FILE = "qarl_scales.safetensors"
_FORMATS = "formats"


def write_scales(folder: str | Path, model: nn.Module) -> None:
    """Write the fixed scales of `model` next to its masters, if it has any."""
    scales = fixed_scales(model)
    if scales:
        formats = {name: [fixed.container, fixed.group_size] for name, fixed in scales.items()}
        tensors = {name: fixed.scale.contiguous() for name, fixed in scales.items()}
        save_file(tensors, Path(folder) / SCALES_FILE, {_FORMATS: json.dumps(formats)})


def keep_scales(model: nn.Module, name_or_path: str | Path, revision: str | None = None) -> None:
    """Have `model`, masters loaded from a folder or the Hub, keep the scales that are stored next to them."""
    path = cached_file(
        str(name_or_path), SCALES_FILE, revision=revision or "main", _raise_exceptions_for_missing_entries=False
    )
    if path is not None:
        with safe_open(path, "pt") as file:
            formats = json.loads(file.metadata()[_FORMATS])
            fix_scales(model, {name: FixedScale(*of, file.get_tensor(name)) for name, of in formats.items()})
