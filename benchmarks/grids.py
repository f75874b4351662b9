"""
Writes the table of squared errors into schemes.md: `python benchmarks/grids.py`.

The error is that of Gaussian weights `(4096, 1024)` with scales in bfloat16, relative to their sum of squares.
"""

from pathlib import Path

import torch

from trl_qarl.quantization.schemes import GROUP_SIZES, get_scheme
from trl_qarl.quantization.tensors import LowBitTensor


PAGE = Path(__file__).parent.parent / "docs" / "schemes.md"


def relative_error(weight: torch.Tensor, name: str, group_size: int) -> float:
    low_bit = LowBitTensor.from_hp(weight, get_scheme(name, group_size), torch.bfloat16)
    return ((low_bit.dequantize(torch.float64) - weight).square().sum() / weight.double().square().sum()).item()


def table() -> str:
    weight = torch.randn(4096, 1024, generator=torch.Generator().manual_seed(0))
    lines = [
        "| scheme | one scale per | squared error | with signed scales | change |",
        "|---|---|---|---|---|",
    ]
    for name in ("w4a16", "w3a16", "w2a16"):
        for group_size in GROUP_SIZES:
            error, signed = (relative_error(weight, n, group_size) for n in (name, f"{name}-signed"))
            change = 100 * (signed / error - 1)
            lines.append(f"| `{name}` | {group_size} | {error:.3g} | {signed:.3g} | {change:.0f} % |")
    return "\n".join(lines)


def fill(page: str) -> str:
    """The text of the page with its table written anew."""
    head, mark, rest = page.partition("<!-- grids -->\n")
    _, end, tail = rest.partition("<!-- end -->\n")
    assert mark and end
    return f"{head}{mark}\n{table()}\n\n{end}{tail}"


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text()))
