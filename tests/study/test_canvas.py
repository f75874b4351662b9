import re
from xml.etree import ElementTree

import pytest


@pytest.fixture(scope="module")
def svg():
    pytest.importorskip("matplotlib")
    from trl_qarl.study.canvas import to_svg

    def draw(axes):
        axes.plot([0, 1], [0, 1 / 3], color="#0072b2")
        axes.text(0.1, 0.1, "0.00012345 <b> -- & url(http://x)")

    return to_svg(draw, "panel", 'a "title" & <more>', (4, 2))


def test_a_panel_is_well_formed_and_says_what_it_is(svg):
    element = ElementTree.fromstring(svg)
    assert element.tag == "svg" and element.get("aria-label") == 'a "title" & <more>' and element.get("viewBox")
    assert element.get("width") is None and element.get("height") is None and "<!--" not in svg


def test_labels_are_kept_and_coordinates_are_short(svg):
    texts = [text.text for text in ElementTree.fromstring(svg).iter("text")]
    assert "0.00012345 <b> -- & url(http://x)" in texts
    path = next(p.get("d") for p in ElementTree.fromstring(svg).iter("path") if "var(--blue)" in p.get("style", ""))
    assert re.search(r"\d\.\d\d ", path) and not re.search(r"\.\d{3}", path)


def test_ids_have_the_name_of_the_panel(svg):
    ids = {element.get("id") for element in ElementTree.fromstring(svg).iter() if element.get("id")}
    assert ids and all(name.startswith("panel-") for name in ids)
    used = set(re.findall(r"url\(#([^)]*)\)", svg)) | {name[1:] for name in re.findall(r'href="([^"]*)"', svg)}
    assert used and used <= ids
