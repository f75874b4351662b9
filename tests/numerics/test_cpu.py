"""Products of vLLM's kernels for CPUs, and what is missing where they are not used."""

import pytest
import torch
import torch.nn.functional as F

from trl_qarl.numerics import cpu as kernels
from trl_qarl.numerics.backends import backend_of


# The last two have more input features than BLAS sums at once: `F.linear` fails there, and oneDNN with a single row.
@pytest.mark.parametrize("shape", [(256, 64), (260, 64), (70, 40), (576, 1536), (896, 4864)])
def test_a_packed_linear_gives_a_row_the_same_bits_among_any_others(shape, arithmetic):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, shape[1], generator=generator).bfloat16()
    weight, bias = torch.randn(shape, generator=generator).bfloat16(), torch.randn(shape[0], generator=generator)
    product = backend_of(weight).PackedLinear(weight)
    together = product(x, bias)
    torch.testing.assert_close(together.float(), F.linear(x.float(), weight.float(), bias), rtol=2**-6, atol=2**-4)
    for num_rows in (1, 2, 3, 4, 5, 16, 31, 33, 64, 200):
        assert torch.equal(product(x[:num_rows], bias), together[:num_rows]), num_rows
        assert torch.equal(product(x[-num_rows:], bias), together[-num_rows:]), num_rows
    # A few numbers in a thousand differ where they do.
    assert torch.equal(torch.cat([product(row, bias) for row in x[:64].split(1)]), together[:64])


@pytest.mark.parametrize(
    ("is_installed", "has_avx512", "reason"),
    [(False, True, "vLLM for CPUs is not installed"), (True, False, "no AVX512")],
)
def test_what_vllms_kernels_lack_here_is_named(monkeypatch, is_installed, has_avx512, reason):
    monkeypatch.setattr(kernels, "find_spec", lambda name: is_installed or None)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: has_avx512)
    monkeypatch.setattr(kernels, "reason_not_to_call", kernels.reason_not_to_call.__wrapped__)
    assert reason in kernels.reason_against.__wrapped__()
