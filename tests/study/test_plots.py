import bisect
from xml.etree import ElementTree

import pytest

from testing_utils.recorded_runs import CONFIG
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

    return to_svg(draw, "panel", (4, 2))


def test_a_panel_is_well_formed_and_grows_with_the_page(svg):
    element = ElementTree.fromstring(svg)
    assert element.tag.endswith("}svg") and element.get("viewBox")
    assert not svg.startswith("<?xml") and "0.00012345 &lt;b&gt; -- &amp; url(http://x)" in svg


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
    _, (figure,) = draw_figures(make_groups([run]))
    return figure


def test_a_distribution_next_to_one_alone_is_a_sentence():
    figure = distribution_of([1.0, 1.000001, 0.999999])
    assert figure.exact == ["All tokens are within 1e-05 of 1."] and not figure.panels
