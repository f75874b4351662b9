import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from trl_qarl.quantization.formats.int4_packed import Int4Packed, to_words


@pytest.mark.parametrize("num_bits", [2, 3])
def test_codes_of_fewer_bits_fill_words_without_gaps(num_bits):
    half = 2 ** (num_bits - 1)
    codes = torch.randint(-half, half, (5, 96), generator=torch.Generator().manual_seed(num_bits), dtype=torch.int8)
    codes[0], codes[1] = -half, half - 1
    words = to_words(Int4Packed().pack(codes), num_bits)
    assert words.dtype == torch.int32 and words.shape == (5, num_bits * 96 // 32)
    for row, packed in zip(codes.tolist(), words.tolist(), strict=True):
        # A row as one number, its first code in the lowest bits.
        number = sum((code + half) << (num_bits * place) for place, code in enumerate(row))
        assert number == sum((word % 2**32) << (32 * place) for place, word in enumerate(packed))
    tensors = {"weight_packed": words, "weight_scale": torch.ones(5, 3), "weight_shape": torch.tensor([5, 96])}
    assert torch.equal(Int4Packed().from_checkpoint(tensors)[0], Int4Packed().pack(codes))
    if num_bits == 2:
        # compressed-tensors 0.17 has gaps at 3 bits alone.
        assert torch.equal(words, pack_to_int32(codes, 2))
