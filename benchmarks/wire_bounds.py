"""
Computes lower bounds for the size of a lossless weight sync of embeddings, or of an adapter, in bf16, next to its
actual size: the table of bounds in `benchmarks/weight_sync.md`.

    python benchmarks/wire_bounds.py MODEL --learning_rate 1e-5

MODEL is a folder, a name on the Hub, or `0.1b` for random weights; `--lora_r 16` measures an adapter. Trains like
`python -m benchmarks.bench publish`, with eight updates between weight syncs.

A bf16 value changes when its float32 master crosses a rounding boundary. The receiver knows the value, but not the
master's position within the local step `u` of bf16. If the receiver also knew the master's whole update `d`, the value
would move by `floor(|d| / u)` steps or by one more, the latter with probability `p = |d| / u - floor(|d| / u)` for a
uniform position. So even with `d`, a receiver needs `H(p) = -p log2 p - (1 - p) log2 (1 - p)` bits, and no code that
starts from the last value needs less on average. If only `|d|` is known and both signs are equally likely, it needs
`min(1, |d| / u)` bits more. Masters just read from a bf16 checkpoint lie on its values, not at uniform positions: the
bound holds for later weight syncs.
"""

import argparse
from collections.abc import Iterator

import torch
from peft import LoraConfig, get_peft_model

from bench.engines import load_learner
from bench.publish import train
from bench.shapes import SHAPES, write_random_model
from trl_qarl.wire.delta import elements, pack_delta


_CHUNK = 1 << 22
_COLUMNS = (
    "updates",
    "changed",
    "if uniform",
    "told updates",
    "told their sizes",
    "exponents",
    "and last change",
    "sent",
)


def binary_entropy(probability: torch.Tensor) -> torch.Tensor:
    """Return the entropy in bits of an event with this probability, elementwise; 0 for certain events."""
    other = 1 - probability
    return -(torch.xlogy(probability, probability) + torch.xlogy(other, other)) / torch.log(torch.tensor(2.0))


def bits_when_told(old: torch.Tensor, new: torch.Tensor) -> tuple[float, float, float]:
    """
    Return the bits for the new bf16 values given the old ones and each master's update, the bits if the signs of the
    updates are unknown, and the expected number of changed values.

    Updates that may reach the next power of two, where the step differs, count as 0 bits.

    Args:
        old, new (`torch.Tensor`):
            Masters of the same shape, float32.
    """
    told, signs, changed = 0.0, 0.0, 0.0
    for before, after in zip(old.view(-1).split(_CHUNK), new.view(-1).split(_CHUNK), strict=True):
        value, update = before.bfloat16().double().abs(), (after.double() - before.double()).abs()
        exponent = value.frexp().exponent
        # bf16 has seven bits after the leading one.
        step = torch.ldexp(torch.ones_like(value), exponent - 8)
        lowest, highest = value - update - step, value + update + step
        is_inside = (lowest > 0) & (lowest.frexp().exponent == exponent) & (highest.frexp().exponent == exponent)
        steps = torch.where(is_inside, update / step, 0)
        certain = steps.clamp(max=1)
        told += float(binary_entropy(steps - steps.floor()).sum())
        signs += float(certain.sum())
        changed += float(torch.where(is_inside, certain, (update / step).clamp(max=1)).nan_to_num().sum())
    return told, told + signs, changed


def entropy_given(changes: torch.Tensor, context: torch.Tensor) -> float:
    """Return the bits of `changes`, in [0, 2**16), for a code that knows their frequencies in each `context`, in
    [0, 2**31)."""

    def bits_of(numbers: torch.Tensor) -> float:
        counts = numbers.unique(return_counts=True)[1].double()
        return float((counts * (len(numbers) / counts).log2()).sum())

    return bits_of(context.long() << 16 | changes.long()) - bits_of(context.long())


def row(masters: list[torch.Tensor]) -> dict[str, float]:
    """
    Return the bits that the last of three consecutive weight syncs needs for the embeddings. With only two, `and last
    change` is missing.

    Args:
        masters (`list[torch.Tensor]`):
            Embeddings at each weight sync, float32.
    """
    values = [elements(master.bfloat16()) for master in masters]
    codes = [torch.from_numpy(value.astype("int32")) for value in values]
    changes = (codes[-1] - codes[-2]) & 0xFFFF
    exponent = codes[-2] >> 7 & 0xFF
    told, sized, expected = bits_when_told(*masters[-2:])
    block, _ = pack_delta([("embeddings", "", *values[-2:])])
    found = {
        "changed": float(changes.count_nonzero()) / len(changes),
        "if uniform": expected / len(changes),
        "told updates": told,
        "told their sizes": sized,
        "exponents": entropy_given(changes, exponent),
        "sent": 8.0 * (len(block) or values[-1].nbytes),
    }
    if len(codes) > 2:
        last = (codes[-2] - codes[-3]).sign() + 1
        found["and last change"] = entropy_given(changes, exponent * 3 + last)
    return found


def measure(
    path: str, learning_rate: float, publications: int, updates: int, lora_r: int = 0
) -> Iterator[tuple[str, dict[str, float], int]]:
    """
    Yield the updates before each weight sync, its [`row`], and the bytes of the whole model in bf16. With the rank
    `lora_r`, an adapter on all linear layers takes the place of embeddings and model.
    """
    model = load_learner(path, "w4a16", torch.bfloat16)
    if lora_r:
        model = get_peft_model(
            model, LoraConfig(r=lora_r, lora_alpha=2 * lora_r, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    size = 2 * sum(parameter.numel() for parameter in trained)
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, betas=(0.9, 0.95))
    published = trained if lora_r else [model.get_input_embeddings().weight]

    def masters_now() -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in published])

    masters = [masters_now()]
    for number in range(publications):
        train(path, model, optimizer, torch.bfloat16, updates, seed=number)
        masters = [*masters[-2:], masters_now()]
        yield f"{number * updates + 1} to {(number + 1) * updates}", row(masters), size


def written(name: str, value: float, size: int) -> str:
    """Format a cell: a share, or bits as MB and as a multiple of the model's `size` bytes in bf16."""
    if name in ("changed", "if uniform"):
        return f"{value:.1%}"
    return f"{value / 8e6:.2f} MB, {value / 8 / size:.4f}x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help=f"folder, name on the Hub, or one of {list(SHAPES)} with random weights")
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    parser.add_argument("--publications", type=int, default=3)
    parser.add_argument("--updates", type=int, default=8, help="updates between two weight syncs")
    parser.add_argument("--lora_r", type=int, default=0, help="rank of an adapter; without it, the embeddings")
    args = parser.parse_args()
    path = write_random_model(args.model) if args.model in SHAPES else args.model
    print("| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|", sep="\n", flush=True)
    for updates, found, size in measure(path, args.learning_rate, args.publications, args.updates, args.lora_r):
        cells = [written(name, found[name], size) if name in found else "-" for name in _COLUMNS[1:]]
        print("| " + " | ".join([updates, *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()
