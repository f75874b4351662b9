import bisect
import math
import random
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from recorded_runs import CONFIG
from trl_qarl.study.groups import make_groups
from trl_qarl.study.runs import Run
from trl_qarl.telemetry.run_files import HISTOGRAM_EDGES


@pytest.fixture(scope="module")
def svg():
    for package in ("matplotlib", "pandas"):
        pytest.importorskip(package)
    from trl_qarl.study.plots import to_svg

    def draw(axes):
        axes.plot([0, 1], [0, 1 / 3], color="#0072b2")
        axes.text(0.1, 0.1, "0.00012345 <b> -- & url(http://x)")

    return to_svg(draw, "panel", 'a "title" & <more>', (4, 2))


def test_a_panel_is_well_formed_and_says_what_it_is(svg):
    element = ElementTree.fromstring(svg)
    assert element.tag == "svg" and element.get("aria-label") == 'a "title" & <more>' and element.get("viewBox")
    assert "<!--" not in svg and "xmlns" not in svg


def test_labels_are_text(svg):
    texts = [text.text for text in ElementTree.fromstring(svg).iter("text")]
    assert "0.00012345 <b> -- & url(http://x)" in texts


def test_ids_of_two_panels_are_not_the_same(svg):
    from trl_qarl.study.plots import to_svg

    def ids_of(svg):
        return {element.get("id") for element in ElementTree.fromstring(svg).iter() if element.get("id")}

    other = to_svg(lambda axes: axes.plot([0, 1], [0, 1 / 3], color="#0072b2"), "other", "title", (4, 2))
    used = set(re.findall(r"url\(#([^)]*)\)", svg)) | {name[1:] for name in re.findall(r'href="([^"]*)"', svg)}
    assert used and used <= ids_of(svg) and ids_of(other) and not ids_of(svg) & ids_of(other)


def distribution_of(ratios):
    """The figure of token ratios of one run, all of positive advantage, with a clip bound at 1.5."""
    pytest.importorskip("pandas")
    pytest.importorskip("matplotlib")
    from trl_qarl.study.plots import draw_figures

    counts = [0] * (len(HISTOGRAM_EDGES) - 1)
    for ratio in ratios:
        counts[bisect.bisect(HISTOGRAM_EDGES, ratio) - 1] += 1
    row = {"step": 1, "name": "token_ratio", "sign": "positive", "edges": HISTOGRAM_EDGES, "counts": counts}
    run = Run("run", CONFIG, {1: {}}, [row | {"bounds": [None, 1.5]}])
    _, (figure,) = draw_figures(make_groups([run]), Path("report.html"))
    return figure


def test_axis_of_a_distribution_shows_what_lies_around_one_and_what_lies_far_out():
    draw = random.Random(0)
    figure = distribution_of(math.exp(draw.gauss(0, 5e-4 if index % 100 else 0.3)) for index in range(3000))
    import matplotlib.pyplot as plt

    _, axes = plt.subplots()
    figure.panels[0][1](axes)
    low, high = axes.get_xlim()
    assert low < math.log(0.7) and math.log(1.5) < high
    places = axes.transData.transform([(x, 0.1) for x in (low, math.log(0.9997), 0, math.log(1.0007), high)])[:, 0]
    shares = [(x - places[0]) / (places[4] - places[0]) for x in places]
    assert 0.2 < shares[1] < shares[2] - 0.05 and shares[2] + 0.05 < shares[3] < 0.8
    assert {"0.999", "1"} <= {label.get_text() for label in axes.get_xticklabels()}
    assert [line.get_xdata()[0] for line in axes.lines] == [math.log(1.5)]
    plt.close()


def test_a_distribution_next_to_one_alone_is_a_sentence():
    figure = distribution_of([1.0, 1.000001, 0.999999])
    assert figure.exact == ["All tokens are within 1e-05 of 1."] and not figure.panels


def test_a_group_without_any_finite_value_is_marked_next_to_one_with_values():
    pytest.importorskip("pandas")
    pytest.importorskip("matplotlib")
    from trl_qarl.study.plots import draw_figures

    runs = [
        Run(str(value), CONFIG | {"quantize_learner": is_aligned}, {step: {"reward": value} for step in (1, 2, 3)})
        for value, is_aligned in ((0.5, True), (None, False))
    ]
    (figure,), _ = draw_figures(make_groups(runs), Path("report.html"))
    # Blue is the line of the first, orange the crosses of the second.
    assert "stroke: #0072b2" in figure.svgs[0] and "stroke: #e69f00" in figure.svgs[0]
