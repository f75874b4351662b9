"""Names imported from other packages, and private parts of PEFT and torchao; test_vllm.py has those of vLLM."""

import pytest
import torch
from torchao.utils import TorchAOBaseTensor

from seams import imported_names, resolve, takes
from trl_qarl.quantization.tensors import LowBitTensor


@pytest.mark.parametrize(
    ("module", "name"),
    [each for package in ("peft", "torchao", "transformers", "trl") for each in imported_names(package)],
)
def test_what_is_imported_is_there(module, name):
    pytest.importorskip(module.partition(".")[0])
    assert resolve(module, name) is not None


def test_the_base_of_our_tensor_gives_what_we_do_not_write():
    for name in ("implements", "implements_torch_function", "_get_to_kwargs"):
        assert hasattr(TorchAOBaseTensor, name), name
    for operation in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
        assert operation in LowBitTensor._ATEN_OP_TABLE[LowBitTensor], operation
    for function in (torch.equal, torch.nn.functional.linear):
        assert function in LowBitTensor._TORCH_FN_TABLE[LowBitTensor], function


def test_layers_of_lora_can_be_replaced_in_peft():
    """`LoraSource` puts methods onto a LoRA layer that call those of the class."""
    peft = pytest.importorskip("peft")
    linear = resolve("peft.tuners.lora", "Linear")
    assert {"forward", "merge", "unmerge"} <= vars(linear).keys()
    assert takes(linear.merge, "self") == takes(linear.unmerge, "self") == takes(linear.forward, "self", "x") == []
    # A class of ours is registered as a linear layer.
    peft.LoraConfig()._register_custom_module({type("Layer", (), {}): linear})
