"""Masters in host memory, on fake tensors of a GPU that is not there: which tensors cross, and what computes where."""

from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.optim.subclass_8bit import get_qmap_signed

from trl_qarl.optimizers.muon import _MuonOfWhole
from trl_qarl.quantization.linear import QuantizedLinear
from trl_qarl.quantization.schemes import SCHEMES
from trl_qarl.quantization.storage import Storage
from trl_qarl.sharding.fsdp2 import MasterShard


class Watch(TorchDispatchMode):
    """Counts the bytes that cross, by direction, and products of matrices by device."""

    def __init__(self):
        super().__init__()
        self.moved, self.products = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        name = function.name()
        if name in ("aten::_to_copy", "aten::copy_"):
            source = args[1] if name == "aten::copy_" else args[0]
            if source.device != output.device:
                self.moved[source.device.type, output.device.type] += source.numel() * source.itemsize
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


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
def test_codes_cross_instead_of_masters(scheme):
    with FakeTensorMode(), Watch() as watch:
        layer = QuantizedLinear.from_linear(torch.nn.Linear(1024, 512, bias=False), SCHEMES[scheme], torch.bfloat16)
        # A fake tensor has no other class.
        shard = SimpleNamespace(device=layer.weight.device, size=None, padded_rows=512)
        shard.weight = layer.quantized_weights["weight"]
        shard.fsdp_pre_all_gather = partial(MasterShard.fsdp_pre_all_gather, shard)
        low_bit = shard.weight.low_bit_weight()
        sent = MasterShard.to(shard, torch.device("cuda", 0), non_blocking=True)
        parts, _ = sent.fsdp_pre_all_gather(SimpleNamespace(size=lambda: 2))
    assert {part.device.type for part in parts} == {"cuda"} and low_bit.device.type == "cpu"
    assert watch.moved == {("cpu", "cuda"): sum(part.nbytes for part in low_bit.parts())}
    assert watch.moved["cpu", "cuda"] < layer.weight.nbytes / 3.9
