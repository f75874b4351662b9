import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from trl_qarl.quantization.formats.int8_zero_points import from_checkpoint, pack, to_checkpoint


@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("num_rows", [1, 8, 14, 48])
def test_zero_points_of_any_number_of_rows_are_compressed_tensors(num_rows, num_groups):
    zero_point = torch.randint(-128, 128, (num_rows, num_groups), dtype=torch.int8)
    qdata, scale = pack(torch.zeros(num_rows, 32 * num_groups)), torch.rand(num_rows, num_groups)
    tensors = to_checkpoint(qdata, scale, zero_point)
    assert torch.equal(tensors["weight_zero_point"], pack_to_int32(zero_point, 8, packed_dim=0))
    assert torch.equal(from_checkpoint(tensors)[2], zero_point)
