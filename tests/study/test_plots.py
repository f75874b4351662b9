import re
from xml.etree import ElementTree

import pytest


@pytest.fixture(scope="module")
def svg():
    pytest.importorskip("matplotlib")
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
