"""Private parts of torchao that we use."""

import torch
from torchao.utils import TorchAOBaseTensor

from trl_qarl.quantization.tensors import LowBitTensor


def test_the_base_of_our_tensor_gives_what_we_do_not_write():
    for name in ("implements", "implements_torch_function", "_get_to_kwargs"):
        assert hasattr(TorchAOBaseTensor, name), name
    for operation in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
        assert operation in LowBitTensor._ATEN_OP_TABLE[LowBitTensor], operation
    for function in (torch.equal, torch.nn.functional.linear):
        assert function in LowBitTensor._TORCH_FN_TABLE[LowBitTensor], function
