"""
Global scales, such as NVFP4's ([`trl_qarl.quantization.formats.fp4`]): chosen when a model is prepared, then constant,
with one for all layers that vLLM fuses into one matrix. vLLM applies the largest scale to the whole matrix, so layers
with different scales would run with other weights than were trained.
"""

from collections.abc import Mapping

from .formats.registry import format_of
from .plan import fused_layers
from .weight import QuantizedLayer


def share_global_scales(layers: Mapping[str, QuantizedLayer], known: Mapping[str, float] | None = None) -> None:
    """Set the global scale of each group of fused layers: the one in `known`, by layer name, else the one for the
    group's largest weight. `ValueError` is raised if `known` lacks a layer."""
    for names in fused_layers(name for name, layer in layers.items() if layer.scheme.container.has_global_scale):
        weights = [weight for name in names for weight in layers[name].quantized_weights.values()]
        if known is not None:
            missing = [name for name in names if name not in known]
            if missing:
                raise ValueError(
                    f"global_scales has no entry {missing[0]!r}. It has to name every layer of "
                    f"{layers[missing[0]].scheme.name!r}."
                )
            scale = known[names[0]]
        else:
            masters = [weight.master().detach() for weight in weights if not weight.is_frozen]
            if not masters or any(master.is_meta for master in masters):
                continue
            scale = min(format_of(weights[0].scheme.container).choose_global_scale(master) for master in masters)
        for weight in weights:
            weight.global_scale = scale
            weight.forget()


def check_global_scales(scales: Mapping[str, float]) -> None:
    """Raise `ValueError` where layers that vLLM holds as one matrix have several global scales, given by name."""
    for names in fused_layers(scales):
        group = {name: scales[name] for name in names}
        if len(set(group.values())) > 1:
            raise ValueError(
                f"The global scales {group} differ, but vLLM holds these layers in one matrix and would apply one scale to all. Prepare "
                "the model as a whole (`prepare_model`)."
            )
