"""
vLLM's side of publication: transfer engines that receive a learner's tensors, reload the model with them, and audit
the result.

A publication is `start_weight_update`, one `update_weights` per chunk, `WorkerExtension.qarl_finish` with the
fingerprints of all tensors, and `finish_weight_update`. Tensors go through vLLM's layer-wise reload, which loads a
layer in checkpoint format, repacks it for its kernel and copies the result into the running tensors.

`qarl_finish` refuses, and the server's gate stays closed, unless all checks of docs/reliability.md ("Weights") pass.
Names may have been received in an earlier publication that is still valid. For tensors that are not repacked,
and with `tensor_parallel_size` above 1, the received tensor is compared with the learner's, and a tensor for which
nothing was sent must keep its value. Requests to load a file are untrusted.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from vllm import envs
from vllm.config import CUDAGraphMode
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    layerwise,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.utils.torch_utils import set_default_torch_dtype

from ..bitwise import cuda
from ..quantization.names import layer_of
from ..replacing import replaced
from ..wire.describe import rotations_in_tables
from ..wire.fingerprint import differing_entries, fingerprint, fingerprint_differences
from ..wire.protocol import (
    EACH,
    SHARED_BY_SHARDS,
    TRANSFER_DIR_VARIABLE,
    is_adapter_tensor,
    load_order,
    tensors_of_experts,
)
from ..wire.transfer_dir import confined_path
from .addresses import Addresses
from .cpu_sampling import register_sampling
from .engine_tensors import (
    as_in_checkpoints,
    convolution_copies,
    drop_unused_norms,
    engine_name,
    first_names,
    is_unused,
    live_fingerprints,
    mappers_of_names,
    mark_rows_by_heads,
    names_by_module,
    owned_names,
    part_name,
    rows_as_loaded,
    tied_names,
)
from .lora import PublishedAdapter, on_bare_model


class AuditedReload:
    """Layer-wise reload with the checks that the module's docstring names; mixed into a `WeightTransferEngine`."""

    model: nn.Module

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # Fingerprints of the last complete publication, by names in a checkpoint.
        self.published: dict[str, str] = {}
        # Fingerprints of the running tensors after the last publication.
        self._live: dict[str, str] = {}
        # Names in a checkpoint that fill each module.
        self._sources: dict[str, list[str]] = {}
        # Numbers of rows of the parameters that stay as loaded, by their names.
        self._rows: dict[str, list[int]] = {}
        self._is_loading = False
        # Engine names of tensors whose fingerprints are taken from the loaded parameters.
        self._read_when_loaded: set[str] = set()
        self._engine_name = partial(engine_name, mappers_of_names(self.model))
        mark_rows_by_heads(self.model)
        drop_unused_norms(self.model)
        # Names that the model's loader maps itself, such as those of experts and Granite 4's `A_log`, by the parameter
        # that they fill.
        self._found: dict[str, dict[Any, str]] = {}
        self._names_of_parameters: dict[int, str] = {}
        self._parts: set[str] = set()
        # A name that nothing in the model has, while its tensor is loaded.
        self._unknown: str | None = None
        self._is_whole = self.parallel_config.tensor_parallel_size == 1
        self.adapter = PublishedAdapter(self.model, self._engine_name, self._is_whole)
        self.has_graphs = self.vllm_config.compilation_config.cudagraph_mode not in (None, CUDAGraphMode.NONE)
        self._addresses: Addresses | None = None
        # Read before a reload, which may be left unfinished, moves the tables to the meta device.
        self.rotations = rotations_in_tables(self.model.modules())
        self._first_names = first_names(self.model)
        # Buffers with random values from dummy loading.
        self._noisy: list[str] = []
        if self.vllm_config.load_config.load_format == "dummy":
            for prefix, layer in self.model.named_modules():
                if is_deferred_attention_layer(layer):
                    # Scales are not published with keys and values in 16 bits.
                    with torch.no_grad():
                        if hasattr(layer, "_k_scale"):
                            set_default_quant_scales(layer)
                elif getattr(layer, "quant_method", None) is None:
                    names = [name for name, buffer in layer._buffers.items() if buffer is not None]
                    names = [name for name in names if name not in layer._non_persistent_buffers_set]
                    self._noisy += [f"{prefix}.{name}" if prefix else name for name in names]
        if self.device.type == "cuda" and envs.VLLM_BATCH_INVARIANT:
            cuda.use_one_tiling()
        # Whether the update in progress has passed all checks.
        self._is_audited = False
        self._forget()

    def _forget(self) -> None:
        # The reason why a chunk could not be loaded.
        self._refusal: str | None = None
        self._arrived: dict[str, str] = {}
        # Names and shapes of received tensors, by engine names.
        self._received: dict[str, tuple[str, torch.Size]] = {}
        # A tied tensor is loaded twice.
        self._loaded: list[tuple[str, str]] = []
        self._processed: dict[str, str] = {}
        # Names in a checkpoint, by those of the running rows that they fill.
        self._filled: dict[str, str] = {}
        self._before: dict[str, str] = {}
        self._owned: dict[str, list[str]] = {}
        self._tied: dict[str, str] = {}
        self.adapter.arriving = {}

    @on_bare_model
    def changed(self) -> list[str]:
        """Return the names in a checkpoint of the running tensors that changed since the last publication.
        `RuntimeError` is raised for a tensor that no publication fills."""
        self._before = live_fingerprints(self.model, self._rows)
        names: set[str] = set()
        for path, value in self._live.items():
            now = self._before.get(path, "gone")
            if now == value:
                continue
            sources = self._sources.get(path.rpartition(".")[0], [])
            # The cache of a rotary embedding takes the dtype of the first queries.
            if not sources and _dtype_and_shape(now) == _dtype_and_shape(value):
                raise RuntimeError(
                    f"The engine's {path} has changed since the last publication ({value} then, {now} now), and no published weight "
                    "restores it. Other code writes into the engine's memory; start the engine again."
                )
            names.update(sources)
        return sorted(names) + self.adapter.changed()

    @on_bare_model
    def start_weight_update(self) -> None:
        before = self._before or live_fingerprints(self.model, self._rows)
        self.abandon()
        self._before, self._is_audited = before, False
        # With LoRA most updates contain only an adapter and need no reload.
        if not hasattr(self.model, "lora_manager"):
            self._start_reload()

    def _start_reload(self) -> None:
        if self.has_graphs and self._addresses is None:
            # Graphs are captured before the first publication.
            self._addresses = Addresses(self.model)
        # Reloading unties tensors for its duration.
        self._tied = dict(tied_names(self.model))
        for parameter in self.model.parameters():
            # vLLM asks loaders for their names (0.31). Norms over all heads of MiniMax-M2 have `partial`s.
            if isinstance(loader := getattr(parameter, "weight_loader", None), partial):
                loader.__name__ = loader.func.__name__
        with set_default_torch_dtype(self.model_config.dtype):
            initialize_layerwise_reload(self.model)
        self._is_loading = True
        self._owned = dict(owned_names(self.model))
        for path, source in self._tied.items():
            self._owned[path] = self._owned[source]
        for path in self._found:
            self._own_found(path)
        self._parts = {part for parts in self._owned.values() for part in parts}
        self._names_of_parameters = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self._read_when_loaded = set(self._watch_layers()) if self._is_whole else set()

    def _own(self, names: Iterable[str]) -> None:
        """Have tensors that are sent under their own names be filled by these: persistent buffers, such as Gemma 4's
        `layer_scalar`, and parameters such as GLM's `gate_up_proj`, whose checkpoints hold the fused matrix that
        vLLM's mapping of packed modules splits."""
        for name in names:
            if name in self._first_names:
                self._owned[self._first_names[name]] = [name]
            if (parts := self._owned.get(name, [name])) != [name]:
                if self._read_when_loaded.issuperset(parts):
                    self._read_when_loaded.add(name)
                self._owned[name] = [name]

    def _own_found(self, path: str) -> None:
        # A second name of the parameter, such as Marlin's `w13_weight` of `w13_weight_packed`, has the same list.
        self._owned.setdefault(path, [])[:] = _in_order(self._found[path])

    def _own_in_place(self, expected: Mapping[str, str], live: Mapping[str, str]) -> None:
        """Find what fills parameters that vLLM loads in place and its loader renames, such as the bias of ERNIE's
        router: the tensor of the same layer with the same last component and the same bytes."""
        sent = {(layer_of(name), _leaf(name), _sum(value)): name for name, value in expected.items()}
        for path, parts in self._owned.items():
            if parts == [path] and _leaf(path) in SKIP_LOAD_TENSORS:
                name = sent.get((layer_of(path), _leaf(path), _sum(live[path])), path)
                # A second name of the parameter has the same list.
                parts[:] = [self._engine_name(name)]

    @on_bare_model
    def abandon(self) -> None:
        """Abandon an unfinished update. The model holds garbage until the next one is finished."""
        if self._is_loading:
            self._finalize()
            self._distrust()
        self._forget()

    def _distrust(self) -> None:
        # Tensors that no publication fills must stay unchanged too.
        self._live = {p: value for p, value in self._live.items() if not self._sources.get(p.rpartition(".")[0])}
        self.published = {}

    @on_bare_model
    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load tensors under their checkpoint names, taking the fingerprint of each."""
        with self._watched_loading():
            self.model.load_weights(tensors)

    def audit(self, expected: Mapping[str, str], drop_adapters: Callable[[], None]) -> None:
        """Reload the layers that have arrived, compare all tensors of a complete publication with the fingerprints
        that are `expected`, and replace the adapter after `drop_adapters`. `RuntimeError` names what differs."""
        try:
            self._compare(dict(expected))
            drop_adapters()
            self.adapter.activate()
        except Exception:
            self._distrust()
            raise
        finally:
            self._forget()
        self._is_audited = True

    def finish_weight_update(self) -> None:
        if not self._is_audited:
            raise RuntimeError("The update was not compared with the learner's tensors: `qarl_finish` has not passed.")
        self._is_audited = False

    @on_bare_model
    def _compare(self, expected: dict[str, str]) -> None:
        if self._refusal is not None:
            raise RuntimeError(self._refusal)
        if self._is_loading:
            self._finalize()
            problems = [] if self._addresses is None else self._addresses.restore()
            live = live_fingerprints(self.model, self._rows)
            self._own_in_place(expected, live)
            self._loaded += [(name, live[rows]) for rows, name in self._filled.items()]
            problems += self._problems(expected) + self._live_problems(expected, live)
        else:
            # Only an adapter. Its base was compared when the update began.
            live = self._before
            problems = fingerprint_differences(expected, self._kept() | self._arrived)
        if problems:
            size = self.parallel_config.tensor_parallel_size
            rank = "" if self._is_whole else f" on rank {self.parallel_config.rank} of {size}"
            raise RuntimeError(f"The published weights are not the learner's{rank}:\n" + "\n".join(problems))
        if self._owned:
            originals = {self._engine_name(name): name for name in expected}
            self._sources = {
                module: [originals[name] for name in names if name in originals]
                for module, names in names_by_module(self._owned).items()
            }
        self.published, self._live = expected, live
        self.adapter.accept(filter(is_adapter_tensor, expected))

    def _kept(self) -> dict[str, str]:
        """Return the valid fingerprints of earlier publications, without an adapter that is replaced."""
        is_new = any(map(is_adapter_tensor, self._arrived))
        return {name: value for name, value in self.published.items() if not (is_new and is_adapter_tensor(name))}

    def _finalize(self) -> None:
        with set_default_torch_dtype(self.model_config.dtype):
            finalize_layerwise_reload(self.model, self.model_config)
        for _, buffer, weight in convolution_copies(self.model):
            buffer.copy_(weight)
        self._is_loading = False

    def _problems(self, expected: Mapping[str, str]) -> list[str]:
        # If a name was loaded several times, keep the fingerprint that differs.
        self._arrived |= sorted(self._loaded, key=lambda item: expected.get(item[0]) != item[1])
        received = self._kept() | self._arrived
        received = {name: value for name, value in received.items() if name in self._arrived or name in expected}
        problems = fingerprint_differences(expected, received)
        self._own(self._engine_name(name) for name in expected)
        owned = {name for names in self._owned.values() for name in names}
        mapped = {self._engine_name(name): name for name in expected if not is_adapter_tensor(name)}
        missing, unknown = (
            sorted(name for name in names if not name.endswith(SHARED_BY_SHARDS))
            for names in (owned - mapped.keys(), mapped.keys() - owned)
        )
        problems += [f"{name}: the learner sent nothing for it" for name in missing][:5]
        unknown = [name for name in unknown if not is_unused(self.model, name)]
        problems += [f"{mapped[name]}: the engine has no such parameter" for name in unknown][:5]
        noisy = "dummy loading has filled this buffer with noise, and the learner sent nothing for it"
        problems += [f"{name}: {noisy}" for name in self._noisy if name not in mapped][:5]
        # vLLM would reload a module of which only a part has arrived, and leave the rest uninitialized.
        arrived = {self._engine_name(name) for name in self._arrived}
        modules = {
            module: {name for name in names if not name.endswith(SHARED_BY_SHARDS)}
            for module, names in names_by_module(self._owned).items()
        }
        problems += [
            f"{module}: the learner sent {sorted(names & arrived)}, but not {sorted(names - arrived)}"
            for module, names in modules.items()
            if names & arrived and names - arrived
        ][:5]
        return problems

    def _live_problems(self, expected: Mapping[str, str], live: Mapping[str, str]) -> list[str]:
        """Describe running tensors that are not what was loaded, or that changed although nothing was sent."""
        learner = {self._engine_name(name): value for name, value in expected.items()}
        arrived = {self._engine_name(name) for name in self._arrived}
        loaded = {path.rpartition(".")[0] for path, parts in self._owned.items() if arrived.intersection(parts)}
        modules = dict(self.model.named_modules())
        copies = {path for path, *_ in convolution_copies(self.model)}
        problems = []
        for path, value in live.items():
            prefix, _, leaf = path.rpartition(".")
            if path in self._filled or path in copies or leaf.endswith(SHARED_BY_SHARDS):
                # Compared with the learner's, copied from what was, or without effect on numbers.
                continue
            if path in self._processed:
                wanted = self._processed[path]
            elif prefix not in loaded or leaf in modules[prefix]._non_persistent_buffers_set:
                # Attention layers compute their scales again at the end of every reload.
                wanted = value if is_deferred_attention_layer(modules[prefix]) else self._before.get(path, value)
            elif hasattr(getattr(modules[prefix], leaf.partition("[")[0]), "weight_loader"):
                # Its loader may convert the tensor of the checkpoint, or take a shard of it.
                wanted = value
            else:
                # A shard of a fused tensor, half of each part, can have the shape of its first part.
                parts = self._owned.get(path, [path])
                wanted = learner.get(parts[0], value) if len(parts) == 1 else value
            if _dtype_and_shape(wanted) == _dtype_and_shape(value):
                problems += [
                    f"{entry}: {loaded} was loaded, but the engine runs with {now}"
                    for entry, loaded, now in differing_entries(path, wanted, value)
                ]
        return problems[:5]

    @contextmanager
    def _watched_loading(self) -> Iterator[None]:
        load_weights, count = self.model.load_weights, layerwise.get_numel_loaded

        def note_and_count(loader: Callable[..., Any], args: Any) -> Any:
            name = self._names_of_parameters.get(id(args.arguments.get("param")))
            if self._unknown is not None and name is not None:
                shard = args.arguments.get("loaded_shard_id", args.arguments.get("shard_id"))
                self._found.setdefault(name, {})[shard] = self._unknown
                self._own_found(name)
            return count(loader, args)

        def load_and_watch(tensors: Iterable[tuple[str, torch.Tensor]]) -> Any:
            weights = self.adapter.take(((name, t.to(self.device)) for name, t in tensors), self._arrived)
            first = next(weights, None)
            if first is None:
                return set()
            if not self._is_loading:
                self._start_reload()
            kept: dict[str, torch.Tensor] = {}
            loaded = load_weights(self._take_fingerprints(chain([first], weights), kept))
            # vLLM reloads a tied output head only through the embedding. A head that is repacked for its kernel, as on
            # a CPU, would keep the old weights.
            for path, source in self._tied.items():
                if source in kept:
                    parameter = self.model.get_parameter(path)
                    getattr(parameter, "weight_loader", default_weight_loader)(parameter, kept[source])
            return loaded

        dtype = set_default_torch_dtype(self.model_config.dtype)
        noting = replaced(layerwise, get_numel_loaded=note_and_count)
        with dtype, noting, replaced(self.model, load_weights=load_and_watch):
            yield

    def _take_fingerprints(
        self, tensors: Iterable[tuple[str, torch.Tensor]], kept: dict[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        sources = set(self._tied.values())
        for name, tensor in tensors:
            own_name = self._engine_name(name)
            self._own([own_name])
            is_read_later = own_name in self._read_when_loaded
            self._arrived[name] = "nothing was loaded" if is_read_later else fingerprint(tensor)
            self._received[own_name] = name, tensor.shape
            if own_name in sources:
                kept[own_name] = tensor
            is_known = own_name in self._owned or own_name in self._parts or own_name in self._first_names
            self._unknown = None if is_known else own_name
            if EACH not in name:
                yield name, tensor
                continue
            # Loaders take a checkpoint's names, and few take the matrices of all experts together.
            yield from tensors_of_experts(name, tensor)
        self._unknown = None

    def _watch_layers(self) -> Iterator[str]:
        """Record the parameters of each layer between loading and repacking, and yield the names of these tensors."""
        for prefix, layer in self.model.named_modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, QuantizeMethodBase):
                for _, _, parts in self._parameters(prefix, layer):
                    yield from parts
                if not hasattr(method, "_qarl_process"):
                    process = method._qarl_process = method.process_weights_after_loading
                    method.process_weights_after_loading = self._record_then(prefix, process)

    def _parameters(self, prefix: str, layer: nn.Module) -> Iterator[tuple[str, nn.Parameter, list[str]]]:
        """Yield the names and parameters of a layer, with the names that fill their rows."""
        for name, parameter in layer.named_parameters(prefix, recurse=False, remove_duplicate=False):
            # vLLM loads some tensors in place, such as the bias of a router: only the running ones are compared.
            if not name.endswith(SHARED_BY_SHARDS) and name.rpartition(".")[2] not in SKIP_LOAD_TENSORS:
                yield name, parameter, self._owned.get(name, [])

    def _record_then(self, prefix: str, process):
        def record_then_process(layer: nn.Module) -> None:
            if not self._is_loading:
                return process(layer)
            as_loaded = set()
            for path, parameter, parts in self._parameters(prefix, layer):
                if not parts or not self._received.keys() >= set(parts):
                    continue
                names, shapes = zip(*(self._received[part] for part in parts), strict=True)
                rows = [size for size, *_ in shapes]
                if sum(rows) == len(parameter) and rows_as_loaded(layer, path.rpartition(".")[2]) is not None:
                    as_loaded.add(path)
                    self._rows[path] = rows
                    # The running rows of a tied head are its source's; the head's kernel repacks these.
                    if path not in self._tied:
                        self._filled |= {part_name(path, i): name for i, name in enumerate(names)}
                        continue
                blocks = as_in_checkpoints(layer, path.rpartition(".")[2])[: sum(rows)].split(rows)
                # Some kernels have gpt-oss' experts padded.
                blocks = (
                    block[tuple(map(slice, shape[: block.ndim]))] for block, shape in zip(blocks, shapes, strict=True)
                )
                self._loaded += [(name, fingerprint(block)) for name, block in zip(names, blocks, strict=True)]
            process(layer)
            for leaf, tensor in (*layer._parameters.items(), *layer._buffers.items()):
                path = f"{prefix}.{leaf}" if prefix else leaf
                is_kept = leaf in layer._non_persistent_buffers_set or leaf in SKIP_LOAD_TENSORS or path in as_loaded
                if tensor is not None and not is_kept:
                    self._processed[path] = fingerprint(tensor)

        return record_then_process


def _in_order(names: Mapping[Any, str]) -> list[str]:
    """Return names by the shards of a fused parameter that they fill, in the order of its rows. One name can fill
    several: the gate and up projections of experts."""
    order = {"q": 0, "k": 1, "v": 2}
    return list(dict.fromkeys(names[shard] for shard in sorted(names, key=lambda shard: order.get(shard, shard or 0))))


def _dtype_and_shape(fingerprint: str) -> str:
    return fingerprint.rpartition(" ")[0]


def _sum(fingerprint: str) -> str:
    return fingerprint.rpartition(" ")[2]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """`file` is the name of a safetensors file in the transfer directory."""

    file: str


class FileReceiver(AuditedReload, WeightTransferEngine[WeightTransferInitInfo, FileUpdateInfo]):
    """Reads weights from safetensors files in one directory, in shared memory or a shared filesystem."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = FileUpdateInfo

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # Read once; the environment of a running process can change.
        self._directory = os.environ.get(TRANSFER_DIR_VARIABLE)
        if self.device.type == "cpu":
            register_sampling()

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Do nothing: the directory is the server's."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one file. An error is kept for `audit`, because a rank that raises here leaves the others' replies in
        their queues. The base class would also synchronize an accelerator on a CPU."""
        if self._refusal is not None:
            return
        try:
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
        except Exception as error:
            self._refusal = f"The engine could not load {update_info}: {type(error).__name__}: {error}"

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        path = confined_path(self._directory, update_info.file)
        with safe_open(path, framework="pt", device=str(self.device)) as file:
            # Tensors are sorted by dtype in the file.
            self.load((name, file.get_tensor(name)) for name in sorted(file.offset_keys(), key=load_order))

    def shutdown(self) -> None:
        """Do nothing."""


class NCCLReceiver(AuditedReload, NCCLWeightTransferEngine):
    """vLLM's NCCL transfer with the same checks."""

    @on_bare_model
    def receive_weights(self, update_info) -> None:
        with self._watched_loading():
            super().receive_weights(update_info)
