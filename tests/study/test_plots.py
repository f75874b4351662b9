import bisect
import math
import random

import pytest

from trl_qarl.study.plots import scale_around_one, ticks_around_one
from trl_qarl.telemetry.run_files import HISTOGRAM_EDGES


def test_axis_of_a_distribution_shows_what_lies_around_one_and_what_lies_far_out():
    counts = [0] * (len(HISTOGRAM_EDGES) - 1)
    draw = random.Random(0)
    for index in range(3000):
        ratio = math.exp(draw.gauss(0, 5e-4 if index % 100 else 0.3))
        counts[bisect.bisect(HISTOGRAM_EDGES, ratio) - 1] += 1
    forward, inverse = scale_around_one([{"edges": HISTOGRAM_EDGES, "counts": counts}])
    low, high = forward(0.5), forward(2.0)
    places = [float((forward(x) - low) / (high - low)) for x in (0.5, 0.9997, 1, 1.0007, 2)]
    assert places[0] == 0 and places[4] == 1 and places[2] == pytest.approx(0.5)
    assert 0.25 < places[1] < 0.45 and 0.55 < places[3] < 0.75
    assert [float(inverse(forward(x))) for x in (0.5, 0.9997, 1.0007, 2)] == pytest.approx([0.5, 0.9997, 1.0007, 2])
    ticks = ticks_around_one(0.5, 2.0, forward)
    assert {0.5, 1.0, 2.0} <= set(ticks) and any(abs(tick - 1) <= 1e-3 for tick in ticks if tick != 1)
