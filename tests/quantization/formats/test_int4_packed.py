import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

from trl_qarl.quantization.formats import int4_packed


def test_every_code_at_every_place_of_a_word_is_laid_out_as_compressed_tensors_does():
    codes = torch.stack([torch.arange(-8, 8).roll(shift) for shift in range(16)]).to(torch.int8)
    packed = int4_packed.pack(codes)
    assert torch.equal(packed, pack_to_int32(codes, 4))
    assert torch.equal(unpack_from_int32(packed, 4, codes.shape), codes)
    assert torch.equal(int4_packed.unsigned_codes(packed), codes.int() + 8)
    assert int4_packed.to_checkpoint(packed, torch.ones(16, 1))["weight_shape"].tolist() == [16, 16]
