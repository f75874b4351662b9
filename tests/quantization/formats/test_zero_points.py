import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from trl_qarl.quantization.formats.zero_points import Int4ZeroPoints, Int8ZeroPoints


@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("num_rows", [1, 8, 12, 14, 48])
@pytest.mark.parametrize(("container", "bits"), [(Int4ZeroPoints(), 4), (Int8ZeroPoints(), 8)])
def test_zero_points_of_any_number_of_rows_are_compressed_tensors(container, bits, num_rows, num_groups):
    zero_point = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (num_rows, num_groups), dtype=torch.int8)
    qdata, scale = container.pack(torch.zeros(num_rows, 32 * num_groups)), torch.rand(num_rows, num_groups)
    tensors = container.to_checkpoint(qdata, scale, zero_point)
    assert torch.equal(tensors["weight_zero_point"], pack_to_int32(zero_point, bits, packed_dim=0))
    again = container.from_checkpoint(tensors)[2]
    assert torch.equal(again, zero_point)
    # A single row or column may have strides that cannot be seen as bytes.
    assert again.stride() == tensors["weight_zero_point"].stride() == (num_groups, 1)
