import torch

from trl_qarl.quantization.formats.e4m3 import Fp8


def test_quotients_are_rounded_to_the_nearest_code_ties_to_even():
    # Between 16 and 32 codes lie 2 apart.
    qdata = Fp8().pack(torch.tensor([[17.0, 19.0, 18.9, -448.0, 2.0**-10]]))
    assert qdata.dtype is torch.float8_e4m3fn
    assert qdata.float().tolist() == [[16.0, 20.0, 18.0, -448.0, 0.0]]
