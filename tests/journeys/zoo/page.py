"""docs/models.md: a row for each family of the zoo."""

import re
from collections.abc import Mapping
from pathlib import Path

from families import FAMILIES, NOTES


BEGIN, END = "<!-- begin: families -->", "<!-- end: families -->"


def row(family: str, dtype: str, visit) -> str:
    """A row of the table."""
    from trl_qarl.models import gguf_architectures

    gguf = "yes" if family in gguf_architectures() else ""
    if visit.found is None:
        last = visit.log.strip().splitlines()[-1]
        # One problem follows the name of the error; the last of several is an item of a list.
        reason = re.sub(r"^([\w.]+(Error|Problems): |- |\d+[.] )?(use_vllm=True: )?", "", last)
        return f"| {family} | {dtype} | **refused**: {reason} | | | | | {gguf} |"
    found = visit.found
    kept = [
        f"{', '.join(f'`{name}`' for name in sorted({n.rpartition('.')[2] for n in names}))} ({reason})"
        for reason, names in found["kept"].items()
        if reason not in ("output head", "outside the language model")
    ]
    before, *after = found["mismatch"]
    plain = [f"{value:.0e}" if isinstance(value, float) else "no" for value in visit.plain.values()]
    note = f" {NOTES[family]}" if family in NOTES else ""
    others = {"bf16": found.get("bf16"), "LoRA": found["lora"]}
    beside = [f"{name}: {max(m):.0e}" if isinstance(m, list) else f"{name}: no" for name, m in others.items() if m]
    mismatch = f"{before:.0e}, {max(after):.0e} ({', '.join(beside)})"
    cells = [found["numerics"], mismatch, "; ".join(kept) + note, *plain, gguf]
    return f"| {family} | {dtype} | {' | '.join(cells)} |"


def write(path: Path, rows: Mapping[str, str], versions: Mapping[str, str]) -> None:
    """Replace the rows of families in the table of the page. The others stay if they were made with the same
    versions."""
    from torch.backends.cpu import get_cpu_capability

    text = path.read_text()
    head = "| family | dtype | numerics | mismatch | in high precision, next to the output head | transformers | vLLM | GGUF |"
    made = ", ".join(f"{name} {value}" for name, value in versions.items())
    made = f"Made on a CPU ({get_cpu_capability()}) with {made}."
    before, table, after = re.split(f"{BEGIN}|{END}", text)
    known = {line.split(" | ")[0][2:]: line for line in table.splitlines() if made in table} | rows
    lines = [made, "", head, "|---" * 8 + "|", *(known[family] for family in FAMILIES if family in known)]
    path.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}")
