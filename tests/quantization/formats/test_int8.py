import torch

from trl_qarl.quantization.formats.int8 import Int8


def test_a_checkpoint_holds_the_codes_themselves():
    qdata = Int8().pack(torch.tensor([[-128.0, 0.0, 127.0]]))
    assert qdata.dtype is torch.int8 and qdata.tolist() == [[-128, 0, 127]]
    assert Int8().to_checkpoint(qdata, torch.ones(1, 1))["weight"] is qdata
