import torch

from trl_qarl.quantization.formats.e4m3 import Fp8, round_to_grid


def test_quotients_are_rounded_to_the_nearest_code_ties_to_even():
    # Between 16 and 32 codes lie 2 apart.
    qdata = Fp8().pack(torch.tensor([[17.0, 19.0, 18.9, -448.0, 2.0**-10]]))
    assert qdata.dtype is torch.float8_e4m3fn
    assert qdata.float().tolist() == [[16.0, 20.0, 18.0, -448.0, 0.0]]


def test_rounding_by_sums_is_the_conversion_to_codes():
    every_bfloat16 = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halfway = (codes[1:] + codes[:-1]) / 2
    numbers = torch.cat([every_bfloat16, halfway, halfway.nextafter(halfway * 2), halfway.nextafter(halfway * 0)])
    numbers = torch.cat([numbers, -numbers, 2.0 ** (torch.rand(10_000) * 40 - 31)])
    numbers = numbers[~(numbers.abs() > 448.0)]
    expected = numbers.to(torch.float8_e4m3fn).float()
    torch.testing.assert_close(round_to_grid(numbers.clone()), expected, rtol=0, atol=0, equal_nan=True)
