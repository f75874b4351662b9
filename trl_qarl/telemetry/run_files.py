"""Names of files that a run writes and the report reads. Needs no torch."""

METRICS_FILE = "metrics.jsonl"
RUN_FILE = "run.json"
