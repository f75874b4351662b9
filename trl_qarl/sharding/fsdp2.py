"""
Low-bit weights of masters sharded by FSDP2: each process quantizes its own rows, then codes and scales are gathered.

A row holds whole groups, so all processes together make the same codes as one process, bit for bit. Codes are made
from the master itself even if `mixed_precision` has FSDP gather other parameters in 16 bits. A low-bit weight without
a master, such as the base of an adapter, is sharded as rows of bytes ([`as_bytes`]) and gathered in the same way.

Outside a forward a sharded layer's weight is a `DTensor`; the layer's master and low-bit weight refer to the local
shard, and [`Rows`] gathers, which every process has to call. In a forward the weight is the gathered [`LowBitTensor`],
whose straight-through gradient FSDP reduces into the rows of the masters.

FSDP2's extension point is `fsdp_pre_all_gather` and `fsdp_post_all_gather` of a *local* tensor
(https://github.com/pytorch/pytorch/pull/122908). [`MasterShard`] defines these two and is otherwise an ordinary tensor
for optimizers, clipping and checkpoints.
"""

import logging
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, StateDictType
from torch.distributed.tensor import DTensor
from transformers.integrations import is_fsdp_enabled
from typing_extensions import override

from ..quantization.inventory import Inventory
from ..quantization.names import base_model, class_of, layer_of
from ..quantization.storage import BACKENDS, Storage
from ..quantization.tensors import LowBitTensor
from ..quantization.weight import MasterSource, QuantizedLayer, QuantizedWeight, TransposedSource
from ..replacing import replaced


logger = logging.getLogger(__name__)

_ALIGNMENT = 64
# Rank of the process that publishes and exports.
_MAIN = 0


class MasterShard(torch.Tensor):
    """
    This process' shard of a master, rows `(rows, K)` or experts `(E, N, K)`, or of a low-bit weight without a master:
    a plain tensor with FSDP2's hooks around an all-gather. It is a part of `weight`. Every process sends `padded_rows`
    rows, as many as the largest shard has in all of its experts.
    """

    # Results of operations are not shards.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyrefly: ignore[bad-override]

    weight: QuantizedWeight
    padded_rows: int

    # With five parameters FSDP would require the padded size of the master (torch 2.13).
    def fsdp_pre_all_gather(self, mesh) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return the tensors that this process sends, and the metadata to read them."""
        return self._sent(mesh, self.device)

    def _sent(self, mesh: DeviceMesh, device: torch.device) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return [`~MasterShard.fsdp_pre_all_gather`] on `device`. The host waits for no copy from pinned memory, and
        torch uses such a block again once its copies have ended, also if it is dropped before."""
        source = self.weight.source
        if source.is_frozen:
            low_bit = source.low_bit(self.as_subclass(torch.Tensor).to(device, non_blocking=True))
        else:
            low_bit = self.weight.low_bit_weight()
        parts = [_with_rows(part.to(device, non_blocking=True), self.padded_rows) for part in low_bit.parts()]
        if mesh.size() > 1:
            return tuple(parts), None
        # With one process FSDP takes only the first tensor (torch 2.13,
        # https://github.com/pytorch/pytorch/pull/197999).
        views, buffer = [], []
        for tensor in parts:
            raw = tensor.reshape(-1).view(torch.uint8)
            views.append((sum(map(len, buffer)), len(raw), tensor.dtype, tensor.shape))
            buffer += [raw, raw.new_zeros(-len(raw) % _ALIGNMENT)]
        return (torch.cat(buffer),), views

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        """Return the low-bit weight and the tensors that hold it; with `out`, fill those again."""
        if out is not None:
            # The number of bits may have changed, in the same container.
            out.scheme = self.weight.scheme
            return None
        held = tuple(outputs)
        if metadata is not None:
            outputs = [held[0][start:][:size].view(dtype).view(shape) for start, size, dtype, shape in metadata]
        shape = self.weight.source.shape(self.weight.parameter)
        parts = (tensor[: shape[:-1].numel()] for tensor in outputs)
        return LowBitTensor.from_parts(parts, self.weight.scheme, param_dtype, shape), held

    @override
    def to(self, *args, **kwargs):
        """Send codes and scales instead of masters to a device other than the masters'."""
        device, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is None or device.type == self.device.type:
            return super().to(*args, **kwargs)

        return SimpleNamespace(size=self.size, fsdp_pre_all_gather=lambda mesh: self._sent(mesh, device))


class Rows(Storage):
    """Storage of a parameter of which this process holds rows: FSDP2 distributes equal blocks, the last ones short."""

    is_whole = False

    @override
    def has(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, DTensor)

    @override
    def is_of(self, model: nn.Module) -> bool:
        return any(isinstance(module, FSDPModule) for module in model.modules())

    @override
    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor._local_tensor

    @override
    def like(self, tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        mesh, placements = tensor.device_mesh, tensor.placements
        sharded = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
        # `from_local` moves a part in host memory to the mesh's device.
        return sharded.to(local.device)

    @override
    def device(self, tensor: torch.Tensor) -> torch.device:
        kind = tensor.device_mesh.device_type
        return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())

    @override
    @contextmanager
    def holding(self, tensor: torch.Tensor, local: torch.Tensor) -> Iterator[None]:
        # FSDP2 always gathers from the memory that it has allocated. Writes to `.data` are not counted.
        part = tensor._local_tensor.data
        held = part.clone()
        part.copy_(local)
        try:
            yield
        finally:
            part.copy_(held)

    @override
    def rows(self, tensor: torch.Tensor) -> range:
        mesh, num_rows = _mesh_of_rows(tensor), tensor.shape[1:-1].numel()
        start = mesh.get_local_rank() * -(-len(tensor) // mesh.size())
        return range(start * num_rows, (start + len(tensor._local_tensor)) * num_rows)

    @override
    def beside(self, tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        # Pinned as FSDP2 pins masters, so that the host does not wait for copies to the GPU.
        return part.pin_memory() if tensor._local_tensor.is_pinned() else part

    @override
    def num_copies(self, tensor: torch.Tensor) -> int:
        return tensor.device_mesh.size() // _mesh_of_rows(tensor).size()

    @override
    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to_local()

    @override
    def gathered(self, tensor: torch.Tensor, part: torch.Tensor, to_main: bool) -> torch.Tensor:
        """Processes of another replica than the main one's send none with `to_main`."""
        mesh, part = _mesh_of_rows(tensor), part.detach().as_subclass(torch.Tensor).to(self.device(tensor))
        # Codes have the rows of all stacked matrices.
        num_rows = tensor.shape[1:-1].numel() if part.ndim < tensor.ndim else 1
        part = _with_rows(part, -(-len(tensor) // mesh.size()) * num_rows)
        raw = part.contiguous().view(torch.uint8)
        is_main = dist.get_rank() == _MAIN
        device = raw.device if is_main or not to_main else torch.device("meta")
        gathered = raw.new_empty((mesh.size() * len(raw), *raw.shape[1:]), device=device)
        if not to_main:
            dist.all_gather_single(gathered, raw, group=mesh.get_group())
        elif _MAIN in mesh.mesh:
            outputs = list(gathered.chunk(mesh.size())) if is_main else None
            dist.gather(raw, outputs, dst=_MAIN, group=mesh.get_group())
        return gathered.view(part.dtype)[: len(tensor) * num_rows]

    @override
    def refresh(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @override
    def keep_gradients_in(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        # FSDP2 rounds what it has added up to this dtype, before it moves it to the host. It is set when the model is
        # first used: for a group up to torch 2.13, and for each parameter from 2.15 on.
        model._get_fsdp_state()._lazy_init()
        for group in _fsdp_groups(model):
            is_of_group = hasattr(group, "_orig_dtype")
            if is_of_group and group._orig_dtype and dtype:
                group._orig_dtype = dtype
            for parameter in group.fsdp_params:
                parameter.sharded_param.grad_dtype = None if is_of_group else dtype
                if not is_of_group:
                    parameter._capture_grad_dtype_policy(parameter.sharded_param)


BACKENDS.append(Rows())


class ShardedSource(MasterSource):
    """This process' rows of a sharded master."""

    @override
    def value(self, weight: torch.Tensor) -> torch.Tensor:
        shard = weight._local_tensor if isinstance(weight, DTensor) else weight
        if not isinstance(shard, MasterShard):
            raise RuntimeError(
                f"The master is {type(shard).__name__} {tuple(shard.shape)} where a shard is expected: other code has replaced or gathered "
                "it. Call `shard_low_bit(model)` after that code."
            )
        return super().value(weight)


class FrozenRows(MasterSource):
    """Rows of bytes that replace a frozen `low_bit` weight: the bytes of its codes, then of its other tensors."""

    is_frozen = True

    def __init__(self, low_bit: LowBitTensor):
        self._parts = [(part.dtype, part[0].nbytes) for part in low_bit.parts()]
        self._of_all = low_bit.scheme, low_bit.orig_dtype
        self._width = low_bit.shape[-1]

    @override
    def shape(self, weight: torch.Tensor) -> torch.Size:
        return torch.Size((len(weight), self._width))

    @override
    def low_bit(self, weight: torch.Tensor) -> LowBitTensor:
        """Return this process' rows."""
        rows = weight.to_local() if isinstance(weight, DTensor) else weight
        parts = rows.split([width for _, width in self._parts], 1)
        parts = (part.contiguous().view(dtype) for part, (dtype, _) in zip(parts, self._parts, strict=True))
        return LowBitTensor.from_parts(parts, *self._of_all)


def loads_once() -> bool:
    """Tell if only one process of each machine loads weights (`fsdp_cpu_ram_efficient_loading`): the others hold zeros
    until accelerate shards the model, and gives all of them the weights of the first process."""
    return is_fsdp_enabled()


@contextmanager
def zeros_without_memory() -> Iterator[None]:
    """While open, make the zeros of processes that load no weights of pages that Linux provides when they are written.
    transformers would take the memory of a whole model in each process (5.17)."""
    make_zeros = torch.zeros_like

    def make_empty_zeros(like: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if kwargs != {"device": "cpu"} or like.numel() == 0:
            return make_zeros(like, **kwargs)
        pages = mmap.mmap(-1, like.numel() * like.element_size())
        return torch.frombuffer(pages, dtype=like.dtype).view(like.shape)

    with replaced(torch, zeros_like=make_empty_zeros):
        yield


def as_bytes(model: nn.Module) -> None:
    """Replace frozen low-bit weights of `model` by rows of bytes, because FSDP2 shards only plain tensors."""
    for layer in model.modules():
        for weight in layer.quantized_weights.values() if isinstance(layer, QuantizedLayer) else ():
            low_bit = weight.parameter
            if isinstance(low_bit, LowBitTensor) and weight.is_frozen:
                parts = [part.contiguous().view(torch.uint8).flatten(1) for part in low_bit.parts()]
                setattr(layer, weight.name, nn.Parameter(torch.cat(parts, 1), requires_grad=False))
                weight.source = FrozenRows(low_bit)


def shard_low_bit(model: nn.Module) -> int:
    """
    Have FSDP2 gather low-bit weights in place of the masters of every quantized layer of the sharded `model`, and
    return the number of weights. Call it after everything that replaces parameters, such as `.to`; it can be called
    again. `RuntimeError` is raised if FSDP2 does not manage the weight of a quantized layer.
    """
    layers = [module for module in model.modules() if isinstance(module, QuantizedLayer)]
    # FSDP refers to a layer that was swapped later by its former module, which shares the table of parameters.
    weights = {(id(layer._parameters), name): w for layer in layers for name, w in layer.quantized_weights.items()}
    num_weights = len(weights)
    for parameter in _fsdp_parameters(model):
        info = parameter._module_info
        weight = weights.pop((id(info.module._parameters), info.param_name), None)
        if weight is None:
            continue
        if weight.scheme.container.has_global_scale and weight.global_scale is None:
            raise RuntimeError(
                f"A weight of {weight.scheme.name!r} has no global scale. Call `prepare_model` while its masters are whole."
            )
        if isinstance(weight.source, TransposedSource):
            raise ValueError(
                f"Masters of {type(info.module).__name__} have inputs before outputs, so their shards are not rows of the low-bit weight. "
                "Use ZeRO-3, or one GPU."
            )
        # FSDP2 would do it at the first forward, and replace a shard that it pads or pins.
        parameter.reset_sharded_param()
        local = parameter.sharded_param._local_tensor
        shard = local if isinstance(local, MasterShard) else local.as_subclass(MasterShard)
        shard.weight, shard.padded_rows = weight, parameter.padded_sharded_param_size[:-1].numel()
        parameter.sharded_param._local_tensor = shard
        parameter._init_extensions()
        if type(weight.source) is MasterSource:
            weight.source = ShardedSource()
        weight.forget()
    if weights:
        raise RuntimeError(
            f"FSDP2 does not manage {len(weights)} of the {num_weights} quantized weights of {type(model).__name__}."
        )
    return num_weights


def keep_class_names(model: nn.Module) -> None:
    """Give the classes that FSDP2 derives the names of the former ones, by which transformers finds names of tensors
    (`get_model_conversion_mapping`) and a model's own code (`custom_object_save`)."""
    for module in model.modules():
        for name in ("__module__", "__name__", "__qualname__") if isinstance(module, FSDPModule) else ():
            setattr(type(module), name, getattr(class_of(module), name))


def check_units(model: nn.Module) -> None:
    """Raise `ValueError` if a unit that FSDP2 gathers is only a part of a decoder layer."""
    inventory = Inventory.of(model)
    layers = {layer_of(name) for name in inventory.layers}
    for name, module in inventory.modules.items():
        layer = layer_of(f"{name}.weight")
        if isinstance(module, FSDPModule) and layer in layers and layer != name:
            raise ValueError(
                f"FSDP2 was told to wrap {type(module).__name__}, so {name!r} is gathered apart from the rest of its layer. Use "
                "`fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP` and leave out `fsdp_transformer_layer_cls_to_wrap`, or name the "
                "class of whole layers."
            )


def choose_units(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> None:
    """Have accelerate shard by those classes of layers that `model` has. It refuses a class that names others, too, as
    Gemma 3's does for a head of the tower that its releases lack (1.15)."""
    if plugin.transformer_cls_names_to_wrap is None:
        present = {type(module).__name__ for module in model.modules()}
        named = getattr(model, "_no_split_modules", None) or ()
        plugin.transformer_cls_names_to_wrap = [name for name in named if name in present]


def shard_when_prepared(accelerator: Accelerator, then: Callable[[nn.Module], None]) -> None:
    """Have models gather low-bit weights once `accelerator.prepare` shards them, and call `then` with each."""
    prepare_whole = accelerator.prepare

    def prepare(*args: Any, **kwargs: Any) -> Any:
        for model in args:
            if isinstance(model, nn.Module):
                as_bytes(model)
        prepared = prepare_whole(*args, **kwargs)
        for each in prepared if isinstance(prepared, (list, tuple)) else [prepared]:
            if isinstance(each, FSDPModule):
                keep_class_names(each)
                check_units(each)
                count = shard_low_bit(each)
                _gather_head(each)
                then(each)
                logger.info("FSDP2 gathers %d low-bit weights in place of their masters.", count)
            elif type(optimizer := getattr(each, "optimizer", None)).__name__ == "AdamW4bit":
                # Compiled, it fails on shards of any model (torch 2.13, torchao 0.18).
                optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)
        return prepared

    # Patched on the instance: accelerate has no hook after a model is sharded.
    accelerator.prepare = prepare  # pyrefly: ignore[bad-assignment]


@contextmanager
def whole_state(accelerator: Accelerator) -> Iterator[None]:
    """While open, has transformers gather the weights that it saves, whatever `fsdp_state_dict_type` is; with
    `SHARDED_STATE_DICT` it would save none outside a checkpoint (5.17)."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        yield
        return
    kind = plugin.state_dict_type
    plugin.state_dict_type = StateDictType.FULL_STATE_DICT
    try:
        yield
    finally:
        plugin.state_dict_type = kind


def _gather_head(model: nn.Module) -> None:
    """
    Have FSDP2 gather the head of `model` after the rest of the forward, because the loss reads its weight directly.

    accelerate shards the head together with the final norm, whose call gathers both, but finds that norm only in
    models of text. Otherwise each process would get the gradient of its own tokens (accelerate 1.15, TRL 1.16).
    """
    model = base_model(model)
    head = model.get_output_embeddings()
    if isinstance(head, FSDPModule):
        model.base_model.register_forward_hook(lambda *_: head.unshard())


def _fsdp_groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield from module._get_fsdp_state()._fsdp_param_groups


def _fsdp_parameters(model: nn.Module) -> Iterator[Any]:
    for group in _fsdp_groups(model):
        yield from group.fsdp_params


def _mesh_of_rows(tensor: Any) -> DeviceMesh:
    """Return the mesh of the processes that divide the rows of a sharded tensor among them. With replicas it is the
    last dimension of the tensor's mesh."""
    mesh = tensor.device_mesh
    return mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]


def _with_rows(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Pad `tensor` to `count` rows with zero bytes; some dtypes of codes do not support zeros."""
    if len(tensor) == count:
        return tensor
    padded = tensor.new_empty((count, *tensor.shape[1:]))
    padded.view(torch.uint8).zero_()
    padded[: len(tensor)] = tensor
    return padded
