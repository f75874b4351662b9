"""The study's picture task: drawing, reward, and a run of pretraining and of a cell."""

import importlib
import itertools
import json
import sys
from pathlib import Path

import pytest

from testing_utils.pictures import needs_torchvision


STUDY = Path(__file__).parents[2] / "benchmarks" / "study"


@pytest.fixture(scope="module")
def shapes():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STUDY)
        yield importlib.import_module("shapes")


def shapes_in(shapes, picture):
    """Colour, shape and side in pixels of what is in each cell, by the pixels that are not white; `None` for none."""
    size = shapes.CELL
    cells = [picture.crop((place * size, 0, (place + 1) * size, size)) for place in range(shapes.NUM_CELLS)]
    return [shape_in(shapes, cell) for cell in cells]


def shape_in(shapes, cell):
    pixels = [(x, y, cell.getpixel((x, y))) for x in range(cell.width) for y in range(cell.height)]
    drawn = [(x, y, color) for x, y, color in pixels if color != (255, 255, 255)]
    if not drawn:
        return None
    brightest = [max(range(3), key=color.__getitem__) for _, _, color in drawn]
    (width, height) = (max(p[axis] for p in drawn) - min(p[axis] for p in drawn) + 1 for axis in (0, 1))
    # A square fills its box, a circle pi / 4 of it, a triangle half.
    share = len(drawn) / (width * height)
    shape = "square" if share > 0.95 else "circle" if share > 0.68 else "triangle"
    return list(shapes.COLORS)[brightest[0]], shape, width - 1


@pytest.mark.parametrize("number", range(5))
def test_counts_of_a_drawn_row_are_right_up_to_each_cell_but_for_small_shapes_that_the_teacher_overlooks(
    shapes, number
):
    (picture, kind, counts), (same, _, overlooking) = (shapes.draw_row(number, share) for share in (0.0, 1.0))
    assert picture.tobytes() == same.tobytes()
    sides = [shape[2] if shape is not None and shape[:2] == kind else 0 for shape in shapes_in(shapes, picture)]
    assert counts == list(itertools.accumulate(side > 0 for side in sides))
    assert overlooking == list(itertools.accumulate(side > shapes.SMALL for side in sides))


def test_rows_that_are_held_out_are_not_trained_on(shapes, monkeypatch):
    monkeypatch.setattr(shapes, "NUM_TRAINED", 50)
    monkeypatch.setattr(shapes, "NUM_HELD_OUT", 50)
    pictures = [[problem["images"][0].tobytes() for problem in problems] for problems in shapes.make_problems()]
    assert len({*pictures[0], *pictures[1]}) == 100


@pytest.mark.parametrize(
    "completion, reward", [("0 1 1", 1), ("5 1", 1), ("0 1 2", 0), ("0 1 1 2", 0), ("11", 0), ("", 0)]
)
def test_rows_reward_the_last_number(shapes, completion, reward):
    for given in (completion, [{"role": "assistant", "content": completion}]):
        assert shapes.right_count([given], ["0 0 1"]) == [reward]


@pytest.mark.slow
@needs_torchvision
def test_a_model_is_pretrained_on_pictures_and_a_cell_of_their_study_runs(shapes, tmp_path, monkeypatch):
    for name, value in {"NUM_TRAINED": 16, "NUM_HELD_OUT": 4, "BATCH_SIZE": 2, "NUM_BATCHES": 2}.items():
        monkeypatch.setattr(shapes, name, value)
    model, cell = str(tmp_path / "model"), tmp_path / "cell"
    monkeypatch.setattr(sys, "argv", ["shapes.py", "pretrain", "--output_dir", model])
    shapes.main()
    (row,) = json.loads(Path(model, "pretraining.json").read_text())
    assert row["step"] == 2 and row["loss"] > 0
    options = ["--model", model, "--output_dir", str(cell), "--max_steps", "2", "--quantize_learner", "false"]
    monkeypatch.setattr(sys, "argv", ["shapes.py", "train", *options])
    shapes.main()
    assert set(json.loads((cell / "scores.json").read_text())) == {"greedy", "sampled", "unquantized greedy"}
    rows = [json.loads(line) for line in (cell / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["mismatch/abs_logp_mean"] > 1e-3
