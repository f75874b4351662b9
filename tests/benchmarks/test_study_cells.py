"""The studies in benchmarks/: what they ask, what they reward, and that they run."""

import importlib.util
import itertools
import json
import re
import sys
from pathlib import Path

import pytest
from transformers import AttentionInterface
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from testing_utils.pictures import needs_torchvision
from trl_qarl.quantization import schemes
from trl_qarl.quantization.tensors import LowBitTensor


STUDY = Path(__file__).parents[2] / "benchmarks" / "study"


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, STUDY / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture(scope="module")
def study():
    yield from load_example("study")


@pytest.fixture(scope="module")
def chain_sums():
    yield from load_example("chain_sums")


@pytest.fixture(scope="module")
def long_study(chain_sums):
    path = sys.path.copy()
    yield from load_example("long_study")
    sys.path[:] = path


@pytest.fixture(scope="module")
def shapes(chain_sums):
    path = sys.path.copy()
    yield from load_example("shapes")
    sys.path[:] = path


@pytest.fixture(autouse=True)
def decode_as_before(monkeypatch):
    """What `decoding.py` changes in transformers and in low-bit weights is undone after each test."""
    monkeypatch.setattr(DynamicLayer, "update", DynamicLayer.update)
    monkeypatch.setattr(LowBitTensor, "dequantize", LowBitTensor.dequantize)
    yield
    AttentionInterface.register("sdpa", sdpa_attention_forward)


@pytest.mark.parametrize("task", ["addition", "counting"])
def test_held_out_problems_are_not_trained_on_nor_shown(study, task):
    train, held_out = study.TASKS[task].make_problems(40, "<eos>")
    questions = [problem["prompt"].splitlines()[-1] for problem in (*train, *held_out)]
    assert len(held_out) == 40 and len(set(questions)) == len(questions)
    assert not any(question in held_out[0]["prompt"].split("\n")[:-1] for question in questions)


@pytest.mark.parametrize("task", ["addition", "counting"])
def test_only_the_answer_earns_the_full_reward(study, task):
    (problem, *_), _ = study.TASKS[task].make_problems(40, "<eos>")
    answer = problem["answer"]
    right, *wrong = study.TASKS[task].reward(
        [f" {answer}", f" {answer} 7", f" {answer}\nList", " 1", "", answer[:-1]], [answer] * 6
    )
    assert right == 1 and all(0 <= reward < 1 for reward in wrong)


@pytest.mark.parametrize(
    "completion, reward",
    [
        (" 46 47 48 49", 1),
        (" 46 47 48", 3 / 4),
        (" 46 47 8 49", 2 / 4),
        (" 46 47 48 49 50", 0),
        (" 46 47 48 49\nList the digits of", 0),
        (" 45 46 47 48", 0),
        ("", 0),
    ],
)
def test_counting_is_rewarded_up_to_the_first_wrong_number(study, completion, reward):
    assert study.share_in_place([completion], ["46 47 48 49"]) == [reward]


def test_chain_sums_are_right_in_every_step(chain_sums):
    train, held_out = chain_sums.make_problems()
    for problem in (*train[:50], *held_out[:50]):
        text = problem["prompt"] + problem["answer"]
        steps = [[int(number) for number in re.findall(r"\d\d", step)] for step in text.rstrip(".").split(";")]
        assert len(text) == 12 * len(steps) and text[-1] == "."
        assert [step[0] for step in steps] == list(range(len(steps), 0, -1))
        assert all(total == (first + second) % 100 for _, first, second, total in steps)
        assert all(after[1:3] == before[2:] for before, after in itertools.pairwise(steps))


def test_chain_sums_of_any_length(chain_sums, tmp_path):
    steps = (60, 90)
    train, held_out = chain_sums.make_problems(steps)
    lengths = {len(problem["answer"]) + 1 for problem in (*train, *held_out)}
    assert min(lengths) == 12 * 60 - 8 and max(lengths) == 12 * 90 - 8 == chain_sums.num_new_tokens(steps) - 24
    assert not {problem["prompt"][3:] for problem in train} & {problem["prompt"][3:] for problem in held_out}
    # What a model was taught last is what a run asks of it.
    model = chain_sums.make_model()
    assert chain_sums.chain_steps(model) == chain_sums.STEPS
    model.config.chain_steps = steps
    model.config.save_pretrained(tmp_path)
    model.config = type(model.config).from_pretrained(tmp_path)
    assert chain_sums.chain_steps(model) == steps


def test_chain_sums_held_out_starts_are_not_trained_on(chain_sums, monkeypatch):
    train, held_out = (
        {problem["prompt"].split(":")[1] for problem in problems} for problems in chain_sums.make_problems()
    )
    assert len(train) == 7700 and len(held_out) == 400 and not train & held_out
    monkeypatch.setattr(chain_sums, "TOKENS_PER_BATCH", 400)
    tokenizer = chain_sums.make_tokenizer()
    for batch in chain_sums.pretraining_batches(tokenizer, chain_sums.split_pairs()[0], [(3, 4)]):
        shown = tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True)
        assert {text[3:9] for text in shown} <= train
        # Only the answer and the end are learned.
        assert ((batch["labels"] == -100).sum(1) == 9).all() and (batch["labels"][:, -1] == 1).all()


@pytest.mark.parametrize(
    "completion, reward",
    [
        ("85;02:47+85=32;01:85+32=17.", 1),
        ("84;02:47+84=31;01:85+32=17.", 1),
        ("85;02:47+85=32;01:85+32=17", 0),
        ("85;02:47+85=32;01:85+32=17.;", 0),
        ("85;02:47+85=32;01:85+32=27.", 0),
        ("17.", 0),
        ("", 0),
    ],
)
def test_chain_sums_reward_the_last_sum(chain_sums, completion, reward):
    assert chain_sums.right_sum([completion], [chain_sums.make_problem(38, 47, 3)["answer"]]) == [reward]


@pytest.fixture(scope="module")
def untrained(chain_sums, tmp_path_factory):
    folder = tmp_path_factory.mktemp("untrained")
    chain_sums.make_model().save_pretrained(folder)
    chain_sums.make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "objective, quantize_learner", [("tbpo", "false"), pytest.param("gspo", "true", marks=pytest.mark.nightly)]
)
def test_a_cell_of_the_long_study_runs(
    chain_sums, long_study, untrained, tmp_path, monkeypatch, objective, quantize_learner
):
    monkeypatch.setattr(chain_sums, "num_new_tokens", lambda steps: 12)
    monkeypatch.setattr(schemes, "SCHEMES", dict(schemes.SCHEMES))
    options = ["--max_steps", "2", "--num_scored", "4", "--error_share", "1", "--objective", objective]
    options += ["--quantize_learner", quantize_learner, "--model", str(untrained), "--output_dir", str(tmp_path)]
    options += ["--num_prompts", "2", "--float32", "--places"] if objective == "tbpo" else []
    monkeypatch.setattr(sys, "argv", ["long_study.py", *options])
    long_study.main()
    assert set(json.loads((tmp_path / "scores.json").read_text())) == {"greedy", "sampled", "unquantized greedy"}
    if objective == "tbpo":
        (row,) = map(json.loads, (tmp_path / "places.jsonl").read_text().splitlines())
        assert row["step"] == 1 and 16 < row["tokens"][0] <= 16 * 12 and row["mismatch"][0] > 0
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["group_size"] == 128 and record["error_share"] == 1
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    # Only a learner of the same low-bit weights agrees with the rollout.
    assert (rows[0]["mismatch/abs_logp_mean"] < 0.05) == (quantize_learner == "true")


def shape_in(shapes, cell):
    """The colour and the shape in a cell, by the pixels that are not white, and `None` for none."""
    pixels = [(x, y, cell.getpixel((x, y))) for x in range(cell.width) for y in range(cell.height)]
    drawn = [(x, y, color) for x, y, color in pixels if color != (255, 255, 255)]
    if not drawn:
        return None
    brightest = [max(range(3), key=color.__getitem__) for _, _, color in drawn]
    (width, height) = (max(p[axis] for p in drawn) - min(p[axis] for p in drawn) + 1 for axis in (0, 1))
    # A square fills its box, a circle pi / 4 of it, a triangle half.
    share = len(drawn) / (width * height)
    shape = "square" if share > 0.95 else "circle" if share > 0.68 else "triangle"
    return list(shapes.COLORS)[brightest[0]], shape


@pytest.mark.parametrize("number", range(5))
def test_counts_of_a_drawn_row_are_right_up_to_each_cell(shapes, number):
    picture, kind, counts = shapes.draw_row(number)
    size = shapes.CELL
    cells = [picture.crop((place * size, 0, (place + 1) * size, size)) for place in range(shapes.NUM_CELLS)]
    found = [shape_in(shapes, cell) == kind for cell in cells]
    assert counts == list(itertools.accumulate(found))


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


@needs_torchvision
def test_a_model_is_pretrained_on_pictures_and_a_cell_of_their_study_runs(shapes, tmp_path, monkeypatch):
    for name, value in {"NUM_TRAINED": 16, "NUM_HELD_OUT": 4, "BATCH_SIZE": 2, "MAX_BATCHES": 10}.items():
        monkeypatch.setattr(shapes, name, value)
    model, cell = str(tmp_path / "model"), tmp_path / "cell"
    monkeypatch.setattr(sys, "argv", ["shapes.py", "pretrain", "--output_dir", model])
    shapes.main()
    (row,) = json.loads(Path(model, "pretraining.json").read_text())
    assert row["step"] == 10 and row["loss"] > 0
    options = ["--model", model, "--output_dir", str(cell), "--max_steps", "2", "--quantize_learner", "false"]
    monkeypatch.setattr(sys, "argv", ["shapes.py", "train", *options])
    shapes.main()
    assert set(json.loads((cell / "scores.json").read_text())) == {"greedy", "sampled", "unquantized greedy"}
    rows = [json.loads(line) for line in (cell / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["mismatch/abs_logp_mean"] > 1e-3
