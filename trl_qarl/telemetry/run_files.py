"""Files that a run writes, and a reader of its metrics. Needs no torch."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any


METRICS_FILE = "metrics.jsonl"
RUN_FILE = "run.json"


def read_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run's metrics. One that was killed, or met a full disk, may have left half a line."""
    for line in (folder / METRICS_FILE).read_text(encoding="utf-8", errors="replace").split("\n"):
        with suppress(ValueError, TypeError, RecursionError):
            # Integers as floats: JSON has numbers that no float holds.
            yield dict(json.loads(line, parse_int=float))
