import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from trl_qarl.quantization.formats.int8_packed import Int8Packed


def test_every_code_is_laid_out_as_compressed_tensors_does():
    codes = torch.arange(-128, 128).view(4, 64).to(torch.int8)
    tensors = Int8Packed().to_checkpoint(codes, torch.ones(4, 1))
    assert torch.equal(tensors["weight_packed"], pack_to_int32(codes, 8))
    assert tensors["weight_shape"].tolist() == [4, 64]
