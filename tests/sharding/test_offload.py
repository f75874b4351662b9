"""Masters in host memory, on fake tensors of a GPU that is not there: which tensors cross, and what computes where."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torchao.optim.subclass_8bit import get_qmap_signed

from trl_qarl.optimizers.muon import _MuonOfWhole
from trl_qarl.quantization.linear import QuantizedLinear
from trl_qarl.quantization.schemes import SCHEMES
from trl_qarl.quantization.storage import Storage
from trl_qarl.sharding.fsdp2 import FrozenRows, MasterShard, as_bytes


def num_bytes(tensor):
    """Bytes of a tensor, or of the codes and scales of torchao's, whose own number is that of its values."""
    if is_traceable_wrapper_subclass(tensor):
        return sum(getattr(tensor, name).nbytes for name in tensor.__tensor_flatten__()[0])
    return tensor.nbytes


class Watch(TorchDispatchMode):
    """Counts the bytes that cross, by direction, and products of matrices by device; keeps what crosses without the
    host waiting."""

    def __init__(self):
        super().__init__()
        self.moved, self.products, self.sent = Counter(), Counter(), []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        name = function.name()
        if name in ("aten::_to_copy", "aten::copy_"):
            source = args[1] if name == "aten::copy_" else args[0]
            if source.device != output.device:
                self.moved[source.device.type, output.device.type] += num_bytes(source)
                self.sent += [source] if (kwargs or {}).get("non_blocking") else []
        if name in ("aten::mm", "aten::addmm"):
            self.products[output.device.type] += 1
        return output


class OnHost(Storage):
    """Parameters of this process alone, kept in host memory for a GPU."""

    is_whole = False

    def device(self, tensor):
        return torch.device("cuda", 0)

    def gathered(self, tensor, part, to_main):
        return part.to(self.device(tensor))


# torchao looks values up in a table, for which a build of torch for CPUs refuses fake tensors of a GPU.
needs_cuda_build = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a build of torch for CUDA")


@pytest.mark.parametrize("in_8_bits", [False, pytest.param(True, marks=needs_cuda_build)])
def test_muon_multiplies_on_the_accelerator_alone(monkeypatch, in_8_bits):
    monkeypatch.setattr("trl_qarl.quantization.storage.BACKENDS", [OnHost()])
    # torchao computes its table of values once, which fake tensors do not have.
    get_qmap_signed()
    with FakeTensorMode(), Watch() as watch:
        weight = torch.nn.Parameter(torch.empty(512, 1024))
        weight.grad_dtype = torch.bfloat16 if in_8_bits else torch.float32
        optimizer = _MuonOfWhole([weight], in_8_bits=in_8_bits, lr=1e-3, weight_decay=0.1)
        # Fake tensors have no values.
        monkeypatch.setattr("trl_qarl.optimizers.muon._have_values", lambda grads: [True] * len(grads))
        weight.grad = torch.empty(512, 1024, dtype=weight.grad_dtype)
        optimizer.step()
        state = optimizer.state[weight]["momentum_buffer"]
    assert weight.device.type == state.device.type == "cpu"
    assert watch.products == {"cuda": 15}
    gradient, momentum = weight.grad.nbytes, weight.numel() * (1 if in_8_bits else 4)
    # The gradient and the momentum go, the momentum and the update in 16 bits come back; scales are 4 bytes of 256.
    assert watch.moved["cpu", "cuda"] == pytest.approx(gradient + momentum, rel=0.02)
    assert watch.moved["cuda", "cpu"] == pytest.approx(2 * weight.numel() + momentum, rel=0.02)


class Shard(SimpleNamespace):
    """The part of [`MasterShard`] that a fake tensor cannot have: it has no other class."""

    _sent = MasterShard._sent

    def as_subclass(self, cls):
        return self.value


def send(weight, value, number):
    """Returns what one of `number` processes gathers with its rows `value` of `weight`."""
    shard = Shard(value=value, device=value.device, size=None, padded_rows=len(value), weight=weight)
    sent = MasterShard.to(shard, torch.device("cuda", 0), non_blocking=True)
    parts, _ = sent.fsdp_pre_all_gather(SimpleNamespace(size=lambda: number))
    assert {part.device.type for part in parts} == {"cuda"}


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
def test_codes_cross_instead_of_masters(scheme, number):
    with FakeTensorMode(), Watch() as watch:
        layer = QuantizedLinear.from_linear(torch.nn.Linear(1024, 512, bias=False), SCHEMES[scheme], torch.bfloat16)
        weight = layer.quantized_weights["weight"]
        low_bit = weight.low_bit_weight()
        send(weight, layer.weight, number)
    assert low_bit.device.type == "cpu"
    assert watch.moved == {("cpu", "cuda"): sum(part.nbytes for part in low_bit.parts())}
    assert watch.moved["cpu", "cuda"] < layer.weight.nbytes / 3.9
    # No other memory of the host, which would not be pinned.
    assert [*map(id, watch.sent)] == [*map(id, low_bit.parts())]


def test_bytes_of_a_frozen_base_cross_from_their_memory(monkeypatch):
    # A build of torch for CPUs divides no fake tensors of a GPU into codes and scales.
    monkeypatch.setattr(FrozenRows, "low_bit", lambda self, rows: SimpleNamespace(parts=lambda: [rows]))
    with FakeTensorMode(), Watch() as watch:
        layer = QuantizedLinear.from_linear(torch.nn.Linear(1024, 512), SCHEMES["w4a16"], torch.bfloat16)
        layer.freeze()
        as_bytes(layer)
        send(layer.quantized_weights["weight"], rows := layer.weight.data, 2)
    assert watch.moved == {("cpu", "cuda"): rows.nbytes} and watch.sent[0] is rows
