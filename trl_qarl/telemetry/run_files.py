"""Names of files that a run writes and the report reads, and edges of the histograms in them. Needs no torch."""

import math


METRICS_FILE = "metrics.jsonl"
BATCHES_FILE = "batches.jsonl"
RUN_FILE = "run.json"
DISTRIBUTIONS_FILE = "distributions.jsonl"

LOG_EDGES = [10 ** (exponent / 4) for exponent in range(-20, 5)]
LOG_EDGES = [-edge for edge in reversed(LOG_EDGES)] + LOG_EDGES

HISTOGRAM_EDGES = [math.exp(edge) for edge in LOG_EDGES]
"""
Edges of histograms of ratios. The distance from 1 in nats is log-spaced on both sides, from 1e-5 to 10: trust bands
are about 1e-4 wide, and mismatches of whole completions reach several nats.
"""
