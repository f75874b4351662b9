"""The studies in benchmarks/: what they ask, what they reward, what they tabulate, and that they run."""

import importlib.util
import itertools
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AttentionInterface
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from testing_utils import make_tiny_model
from trl_qarl import prepare_model
from trl_qarl.quantization import schemes
from trl_qarl.quantization.swap import quantized_forward, quantized_layers
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


@pytest.fixture(autouse=True)
def decode_as_before(monkeypatch):
    """What `decoding.py` changes in transformers and in low-bit weights is undone after each test."""
    monkeypatch.setattr(DynamicLayer, "update", DynamicLayer.update)
    monkeypatch.setattr(LowBitTensor, "dequantize", LowBitTensor.dequantize)
    yield
    AttentionInterface.register("sdpa", sdpa_attention_forward)


@pytest.fixture(scope="module")
def long_tables():
    pytest.importorskip("scipy")
    path = sys.path.copy()
    yield from load_example("long_tables")
    sys.path[:] = path


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


@pytest.mark.parametrize("objective, quantize_learner", [("tbpo", "false"), ("gspo", "true")])
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


def test_dropped_answers_are_counted_by_their_error_tokens(long_study, tmp_path):
    batch = {
        "completion_mask": torch.ones(3, 4),
        "old_per_token_logps": torch.full((3, 4), -1.0).index_put_(
            (torch.tensor(1), torch.tensor(2)), torch.tensor(-15.0)
        ),
        "sampling_per_token_logps": torch.full((3, 4), -1.5).index_put_(
            (torch.tensor(1), torch.tensor(2)), torch.tensor(-14.0)
        ),
        "advantages": torch.tensor([1.0, -1.0, 0.0]),
    }
    recorder = SimpleNamespace(reduce=lambda metrics: metrics)
    trainer = SimpleNamespace(recorder=recorder, state=SimpleNamespace(global_step=0))
    trainer._generate_and_score_completions = lambda inputs: inputs
    # The second answer is dropped, the third does not count.
    dropped = {"tbpo/dropped/total": torch.tensor([0.0, 1.0, float("nan")])}
    trainer._compute_loss = lambda model, inputs: recorder.reduce(dropped)
    long_study.places.PlaceRecorder(trainer, tmp_path / "places.jsonl")
    trainer._generate_and_score_completions(batch)
    trainer._compute_loss(None, batch)
    trainer._generate_and_score_completions(batch)
    first, second = map(json.loads, (tmp_path / "places.jsonl").read_text().splitlines())
    assert first["dropped"] == {"with": [0, 0], "without": [0, 0]}
    assert second["dropped"] == {"with": [1, 1], "without": [1, 0]}
    assert first["errors"] == [1.0] and first["sequence_mismatch"] == [2.0, 0.5]


def test_faster_decoding_samples_the_same_and_keeps_a_dense_weight_until_it_changes(
    chain_sums, long_study, monkeypatch
):
    model, tokenizer = chain_sums.make_model(layers=2, key_value_heads=1), chain_sums.make_tokenizer()
    problems = chain_sums.make_problems()[0][:3]
    prepare_model(model, "w4a16", scale_dtype=torch.float32)

    def answers():
        with quantized_forward(model):
            return chain_sums.answer_problems(model, tokenizer, problems, 0.0, bf16=False)

    before = answers()
    long_study.decoding.decode_faster()
    assert answers() == before
    with torch.no_grad():
        for layer in quantized_layers(model).values():
            layer.weight.neg_()
    assert (changed := answers()) != before
    monkeypatch.undo()
    assert changed == answers()


@pytest.mark.parametrize("quantize_learner", ["true", "false"])
def test_a_cell_of_a_mixture_counts_routes_that_flip(chain_sums, long_study, tmp_path, monkeypatch, quantize_learner):
    torch.manual_seed(0)
    chain_sums.make_mixture().save_pretrained(tmp_path)
    chain_sums.make_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(chain_sums, "num_new_tokens", lambda steps: 6)
    monkeypatch.setattr(schemes, "SCHEMES", dict(schemes.SCHEMES))
    options = ["--max_steps", "1", "--num_scored", "4", "--scheme", "w3a16-g32", "--objective", "tbpo"]
    options += [
        "--quantize_learner",
        quantize_learner,
        "--model",
        str(tmp_path),
        "--output_dir",
        str(tmp_path / "cell"),
    ]
    monkeypatch.setattr(sys, "argv", ["long_study.py", *options])
    long_study.main()
    (row,) = map(json.loads, (tmp_path / "cell" / "routes.jsonl").read_text().splitlines())
    assert row["step"] == 1 and row["flipped"] <= row["flipped_tokens"]
    assert row["flipped"] < 0.1 if quantize_learner == "true" else row["flipped"] > 0.3
    assert [len(shares) for shares in row["load"]] == [8] * 3
    # Each token has two experts, so none has more than half of the choices.
    assert all(sum(shares) == pytest.approx(1, abs=1e-3) and max(shares) <= 0.5 for shares in row["load"])


def test_injected_errors_keep_the_log_probs_of_the_policy(chain_sums, long_study):
    from trl_qarl.rollout.transformers_rollout import record_sampling_logps

    model = chain_sums.make_model().eval()
    with torch.no_grad():
        # Sharp: a character that is drawn uniformly is improbable.
        model.model.norm.weight.mul_(20)
    prompt = torch.full((4, 5), 3)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 16, "min_new_tokens": 16, "pad_token_id": 0}

    def count_improbable(share):
        long_study.inject_errors(model, share, seed=0, length=4, last_start=8)
        torch.manual_seed(0)
        with torch.no_grad(), record_sampling_logps(model, 1.0) as recorded:
            tokens = model.generate(prompt, **options)
        del model.generate
        with torch.no_grad():
            logps = model(tokens).logits[:, 4:-1].log_softmax(-1).gather(2, tokens[:, 5:, None]).squeeze(2)
        # `min_new_tokens` takes the end away, so a policy that wanted to end is a little off.
        torch.testing.assert_close(recorded[0], logps, atol=1e-3, rtol=1e-3)
        return (recorded[0] < -7).sum(1).tolist()

    assert count_improbable(0.0) == [0, 0, 0, 0]
    assert all(1 <= count <= 4 for count in count_improbable(1.0))


def test_a_noisy_engine_reports_what_it_drew_errors_with(chain_sums, long_study):
    from trl_qarl.rollout.transformers_rollout import record_sampling_logps

    model = chain_sums.make_model().eval()
    long_study.inject_errors(model, 1.0, seed=0, length=16, last_start=1, known=True)
    with torch.no_grad(), record_sampling_logps(model, 1.0) as recorded:
        model.generate(torch.full((4, 5), 3), do_sample=True, top_k=0, max_new_tokens=16, pad_token_id=0)
    uniform = torch.full((4, 16), -math.log(len(chain_sums.CHARACTERS)))
    torch.testing.assert_close(recorded[0], uniform, atol=1e-4, rtol=0)


def test_band_scale_leaves_the_stated_share_outside(long_tables, tmp_path):
    edges = [math.exp(x) for x in (-1.0, -0.1, -0.01, 0.01, 0.1, 1.0)]
    rows = [{"name": "ratio", "sign": sign, "edges": edges, "counts": [5, 0, 40, 0, 5]} for sign in ("a", "b")]
    rows.append({"name": "token_ratio", "sign": "a", "edges": edges, "counts": [1000, 0, 0, 0, 0]})
    (tmp_path / "distributions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    # 20 of 100 lie between 0.1 and 1 on either side; 15 of them above 0.325, if they are spread evenly.
    found = long_tables.band_scale(tmp_path)
    assert found["offset"] == pytest.approx(0.325) and found["band_scale"] == pytest.approx(0.325 / 3.5e-4)


def test_tables_of_the_long_study_use_the_last_quarter_and_all_seeds(long_tables, tmp_path, capsys):
    for seed, reward in enumerate((0.5, 0.6, 0.7)):
        run = tmp_path / "long" / f"seed{seed}"
        run.mkdir(parents=True)
        settings = {"seed": seed, "objective": "tbpo", "scheme": "w4a16", "quantize_learner": True}
        (run / "run.json").write_text(json.dumps({**settings, "max_steps": 64}))
        (run / "cell.json").write_text(json.dumps({"cell": settings}))
        (run / "evaluation.json").write_text(
            json.dumps({"greedy": {"correct": 3, "total": 4}, "w4a16 greedy": {"correct": seed, "total": 4}})
        )
        rows = [{"step": step, "entropy": 0.2 * step} for step in range(1, 65)]
        for row in rows[::8]:
            # Logged once for each batch of eight updates; six of the eight batches earn nothing.
            row["reward"] = reward if row["step"] > 48 else 0.0
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        # Two batches; a thousand tokens and one error token in the first three hundred of each.
        counts = {"tokens": [1000, 0, 0, 500], "errors": [1, 0, 0, 0], "mismatch": [2.0, 0, 0, 3.0]}
        counts |= {
            "sequences": [1, 1],
            "sequence_mismatch": [0.5, 4.0],
            "dropped": {"with": [2, 1], "without": [8, 0]},
        }
        (run / "places.jsonl").write_text("\n".join([json.dumps({"step": step} | counts) for step in (1, 9)]))
        # The third cell is not finished yet.
        if seed < 2:
            (run / "finished").touch()
    path = tmp_path / "study.json"
    for options in (["--collect", str(tmp_path / "long"), "--output", str(path)], [str(path)]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["long_tables.py", *options])
            long_tables.main()
    lines = capsys.readouterr().out.splitlines()
    # The interval of Student's distribution with 1 degree of freedom: 12.706 * 10 / sqrt(2) / sqrt(2).
    assert "| w4a16 | QaRL, tbpo | 2 | 55 ± 64 | 75 ± 0 | - | - |" in lines
    assert "| w4a16 | QaRL, tbpo, quantized afterwards | 2 | - | 12 ± 159 | - | - |" in lines
    # First and last quarter: the mean over steps 1 to 16, and over 49 to 64.
    assert "| w4a16 | QaRL, tbpo | - | 1.7 to 11 | - | - | - |" in lines

    assert "| w4a16 | QaRL, tbpo | 100 | 0 | - | 0.002 | 0.006 | - | 0.5 | 4 | 50 | 0 |" in lines

    # Collected again: what has the same settings is renewed, what another day or study has found stays.
    found = json.loads(path.read_text())
    others = [found[0] | {"study": "other"}, found[0] | {"seed": 7}]
    path.write_text(json.dumps([*others, found[0] | {"scores": {"greedy": 1.0}}, found[1]]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["long_tables.py", "--collect", str(tmp_path / "long"), "--output", str(path)])
        long_tables.main()
    assert json.loads(path.read_text()) == [*others, *found]


def test_a_change_is_compared_with_its_recipe_beside_the_noise(long_tables):
    def cells(scheme, rewards):
        settings = {"scheme": scheme, "quantize_learner": True, "objective": "tbpo"}
        scores = {"greedy": 50.0, "sampled": 40.0 if scheme == "w3-g32" else 50.0}
        return [
            {**settings, "seed": seed, "scores": scores, "course": {"reward": [0.0, 0.0, 0.0, reward]}}
            for seed, reward in enumerate(rewards)
        ]

    recipe, run = ("w3-g32", "QaRL", "tbpo"), ("QaRL", "tbpo")
    groups = {recipe: cells("w3-g32", [0.4, 0.5]), ("w3-g32-mse", *run): cells("w3-g32-mse", [0.5, 0.6])}
    groups["w3-g32-gptq", *run] = cells("w3-g32-gptq", [0.7])
    # Two and two seeds with a standard deviation of 7.07: 4.303 * 7.07 * sqrt(1 / 2 + 1 / 2).
    assert long_tables.changes_table(groups)[2:] == [
        "| mse | 2 | +10 (30) | +0 (0) | **+10** (0) |",
        "| gptq | 1 | +25 (-) | +0 (-) | +10 (-) |",
    ]


def test_masters_of_several_precisions_have_a_row_with_each(long_tables):
    scores = {f"{bits} bits {name}": 10.0 * bits for bits in (4, 3, 2) for name in ("greedy", "sampled")}
    cells = [{"scores": scores | {"3 bits greedy": score}} for score in (30.0, 34.0)]
    groups = {("w4a16", "QaRL", "tbpo"): [{"scores": {"greedy": 1.0}}], ("nested-43", "QaRL", "tbpo"): cells}
    assert long_tables.bits_table(groups)[2:] == [
        "| nested-43 | 2 | 40 ± 0 | 32 ± 25 | 20 ± 0 | 40 ± 0 | 30 ± 0 | 20 ± 0 |"
    ]


def test_tails_are_the_bins_beyond_e_and_its_inverse(long_tables):
    row = {"name": "token_mismatch_weight", "edges": [0.1, 0.3, 0.5, 2.0, 3.0, 4.0], "step": 1}
    rows = [
        {**row, "counts": [1, 2, 3, 4, 5]},
        {**row, "counts": [1, 0, 0, 4, 0]},
        {**row, "name": "ratio", "counts": [9] * 5},
    ]
    assert long_tables.count_tails(rows) == {"tail/low": {1: 2 / 20}, "tail/high": {1: 5 / 20}}


def test_filling_a_page_renews_its_tables_alone(long_tables):
    scores = dict.fromkeys(("greedy", "sampled"), 50.0)
    settings = {"study": "s", "scheme": "w4a16", "quantize_learner": True, "objective": "tbpo", "seed": 0}
    cells = [{**settings, "scores": scores, "course": {"reward": [0.25] * 4}}]
    page = "before\n<!-- s: ends -->\n| old |\n<!-- end -->\nbetween\n<!-- other: ends -->\n| old |\n<!-- end -->\n"
    before, _, after = long_tables.fill(page, cells).partition("<!-- s: ends -->\n")
    assert before == "before\n"
    assert after == (
        "| scheme | run | seeds | final reward | greedy | sampled | masters, greedy |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| w4a16 | QaRL, tbpo | 1 | 25 | 50 | 50 | - |\n"
        "<!-- end -->\nbetween\n<!-- other: ends -->\n| old |\n<!-- end -->\n"
    )


@pytest.fixture(scope="module")
def long_starts(long_study):
    return long_study.long_starts


def make_low_bit(chain_sums, num_bits=3):
    from trl_qarl import prepare_model
    from trl_qarl.quantization.schemes import get_scheme

    model = chain_sums.make_model().eval()
    prepare_model(model, get_scheme(f"w{num_bits}a16-observer", 32), scale_dtype=torch.float32)
    return model


def weight_errors(model, before):
    from trl_qarl.quantization.swap import quantized_layers

    return {
        name: (layer.low_bit_weight().dequantize() - before[f"{name}.weight"]).square().sum().item()
        for name, layer in quantized_layers(model).items()
    }


def test_clipped_start_has_less_error_in_its_weights(chain_sums, long_starts):
    model = make_low_bit(chain_sums)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    nearest = weight_errors(model, before)
    long_starts.clip_to_best_scale(model)
    clipped = weight_errors(model, before)
    assert all(clipped[name] < 0.95 * error for name, error in nearest.items())


def test_start_by_gptq_has_less_error_in_outputs_and_is_kept_by_the_quantizer(chain_sums, long_starts):
    from trl_qarl.quantization.swap import quantized_layers

    model = make_low_bit(chain_sums)
    trainer = SimpleNamespace(model=model, args=SimpleNamespace(bf16=False))
    tokens = torch.randint(2, 17, (16, 48), generator=torch.Generator().manual_seed(0))
    layer = quantized_layers(model)["model.layers.0.self_attn.q_proj"]
    rows = []
    layer.register_forward_hook(lambda module, inputs, output: rows.append(inputs[0].flatten(0, -2)))
    with torch.no_grad():
        model(tokens)
        exact = layer.weight.clone()
        nearest = layer.low_bit_weight().dequantize()
        long_starts.round_by_gptq(trainer, tokens)
        found = layer.low_bit_weight().dequantize()
        errors = [(rows[0] @ (weight - exact).T).square().sum().item() for weight in (nearest, found)]
    assert errors[1] < 0.8 * errors[0]
    # The masters are these numbers, but where a code is at an edge of its range.
    codes = (layer.weight / found).nan_to_num(1.0)
    assert ((codes - 1).abs() < 1e-5).float().mean() > 0.5
    edge = layer.scheme.grid.scale_divisor / layer.scheme.grid.quant_range[1]
    assert codes[(codes - 1).abs() > 1e-5].min() > 0.87 and codes.max() < edge + 1e-5


def test_gptq_refuses_scales_that_follow_another_rule(chain_sums, long_starts):
    from trl_qarl import prepare_model
    from trl_qarl.quantization.schemes import get_scheme

    model = chain_sums.make_model()
    prepare_model(model, get_scheme("w3a16", 32), scale_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"not the rule of \['w3a16'\]"):
        long_starts.round_by_gptq(SimpleNamespace(model=model), torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize("name, precisions", [("w3a16-observer", None), ("w4a16", [3, 2])])
def test_warm_start_brings_the_low_bit_policy_nearer(chain_sums, long_starts, tmp_path, name, precisions):
    from datasets import Dataset
    from trl import DistillationConfig

    from trl_qarl import prepare_model, restore_model
    from trl_qarl.quantization.precisions import at_bits
    from trl_qarl.quantization.schemes import get_scheme

    student, teacher = chain_sums.make_model(), chain_sums.make_model()
    scheme = get_scheme(name, 32)
    tokens = torch.randint(2, 17, (16, 32), generator=torch.Generator().manual_seed(0))

    def distance(bits):
        prepare_model(student, scheme if bits is None else at_bits(scheme, bits), scale_dtype=torch.float32)
        with torch.no_grad():
            low_bit, unquantized = (
                long_starts.divergence.log_probs(model.eval(), tokens) for model in (student, teacher)
            )
        restore_model(student)
        return long_starts.divergence.divergence(
            unquantized, low_bit, torch.ones_like(tokens, dtype=torch.bool)
        ).item()

    bits = precisions and min(precisions)
    before = distance(bits)
    config = DistillationConfig(
        str(tmp_path),
        max_steps=8 * len(precisions or [None]),
        learning_rate=3e-4,
        per_device_train_batch_size=8,
        max_completion_length=16,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to=[],
    )
    prompts = Dataset.from_dict({"prompt": [f"0{number}:12+34=" for number in range(8)]})
    long_starts.warm_start(student, teacher, scheme, prompts, chain_sums.make_tokenizer(), config, precisions)
    assert type(student.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert distance(bits) < 0.9 * before


def test_warm_start_refuses_bits_that_the_scheme_does_not_have(chain_sums, long_starts):
    from trl_qarl.quantization.schemes import get_scheme

    arguments = (None, get_scheme("w3a16", 32), None, None, SimpleNamespace(bf16=False, max_steps=8))
    with pytest.raises(ValueError, match="has 4 bits, which no layer of scheme 'w3a16' can have"):
        long_starts.warm_start(chain_sums.make_model(), *arguments, [4, 3])


def test_nested_masters_are_scored_at_each_precision(chain_sums, long_study, untrained, tmp_path, monkeypatch):
    monkeypatch.setattr(chain_sums, "num_new_tokens", lambda steps: 12)
    monkeypatch.setattr(long_study, "VARIANTS", long_study.VARIANTS | {"nested": long_study.VARIANTS["nested-432"]})
    monkeypatch.setitem(long_study.VARIANTS["nested"], "precisions", {0: 3, 8: 2})
    monkeypatch.setitem(long_study.VARIANTS["nested"], "start", "mse")
    options = ["--max_steps", "1", "--num_scored", "4", "--scheme", "nested"]
    monkeypatch.setattr(sys, "argv", ["", *options, "--model", str(untrained), "--output_dir", str(tmp_path)])
    read_at = []
    monkeypatch.setattr(
        chain_sums, "score", lambda *args: read_at.append(trainers[0].policy.bits[0]) or 0.25 * len(read_at) % 1
    )
    make_trainer, trainers = long_study.make_trainer, []
    monkeypatch.setattr(long_study, "make_trainer", lambda args: trainers.append(make_trainer(args)) or trainers[0])
    long_study.main()
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert json.loads((tmp_path / "run.json").read_text())["start"] == "mse"
    assert read_at == [4, 4, 3, 3, 2, 2, 2] and trainers[0].args.precisions == {0: 3}
    assert set(scores) == {"greedy", "sampled", "unquantized greedy"} | {
        f"{bits} bits {name}" for bits in (4, 3, 2) for name in ("greedy", "sampled")
    }
    assert scores["greedy"] == scores["2 bits greedy"] and scores["sampled"] == scores["2 bits sampled"]


@pytest.mark.parametrize("optim", ["adamw_torch", "muon"])
def test_trust_bands_are_measured_by_length(tmp_path, monkeypatch, capsys, optim):
    (module,) = [*load_example("trust_bands")]
    model = make_tiny_model(tmp_path, "qwen3")
    options = ["--length", "16", "--num_completions", "1", "--num_updates", "2", "--learning_rate", "1e-2"]
    monkeypatch.setattr(sys, "argv", ["trust_bands.py", "--model_name_or_path", model, "--optim", optim, *options])
    module.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if re.match(r"\| \d", line)]
    assert [int(row.split("|")[1]) for row in rows] == [4, 16]
    assert all(float(row.split("|")[4]) > 1e-6 for row in rows)
