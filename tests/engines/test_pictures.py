"""Prompts with pictures, and completions with a sampled placeholder; test_vllm_pictures.py has engines."""

import base64
import copy
import io
import pickle
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from PIL import Image

from testing_utils import make_tiny_config
from testing_utils.pictures import make_picture_config
from trl_qarl.checkpoint.load import skeleton
from trl_qarl.engines.answers import BadAnswer
from trl_qarl.engines.pictures import (
    MAX_DRAWS,
    ExpandedPrompt,
    check_rows,
    complete_prompts,
    count_pictures,
    draw_again,
    open_pictures,
    picture_request,
    placeholders_of,
    problem_of_class,
    with_pictures,
)


PLACEHOLDER = 7
TEXT = [{"role": "user", "content": "Hello"}]
PICTURE = [{"role": "user", "content": [{"type": "image", "image": None}, {"type": "text", "text": "Hello"}]}]
ROW = ExpandedPrompt([1, PLACEHOLDER, PLACEHOLDER, 2], [1, PLACEHOLDER, 2])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda row: pickle.loads(pickle.dumps(row))])
def test_what_is_appended_to_a_copied_prompt_is_sent_too(copied):
    longer = copied(ROW) + [3] + [4]
    assert longer == [1, PLACEHOLDER, PLACEHOLDER, 2, 3, 4] and longer.sent == [1, PLACEHOLDER, 2, 3, 4]


def test_a_sampled_placeholder_is_named():
    with pytest.raises(BadAnswer, match=f"completion 1 of 2, token 2 of 3: 7 is the placeholder.*{MAX_DRAWS} times"):
        draw_again([[1], [5, 6, 7]], lambda row: row, frozenset([PLACEHOLDER]), lambda places: [[5, 6, 7]])


@pytest.mark.parametrize(
    ("inputs", "num_processes", "reason"),
    [
        (["pixel_values"], 1, "SimpleNamespace pads rows, and TRL 1.16 splits them"),
        (["pixel_values", "image_grid_thw"], 2, "would not compute the vision tower, and the other 1 would wait"),
        (["pixel_values", "image_grid_thw"], 1, None),
    ],
)
def test_an_ambiguous_row_without_pictures_is_refused(inputs, num_processes, reason):
    processor = SimpleNamespace(image_processor=SimpleNamespace(model_input_names=inputs))
    with pytest.raises(ValueError, match=f"prompt 1 of 3 has no picture.*{reason}") if reason else nullcontext():
        check_rows(count_pictures([PICTURE, TEXT, TEXT]), processor, num_processes)
    calls = [{"role": "assistant", "tool_calls": []}, {"role": "tool", "content": "3"}]
    check_rows(count_pictures([TEXT, "Hello", calls]), processor, num_processes)
    check_rows(count_pictures([PICTURE, PICTURE]), processor, num_processes)


def test_a_picture_that_a_path_names_is_opened(tmp_path):
    Image.new("RGB", (2, 1), "red").save(tmp_path / "red.png")
    named = [
        {"role": "user", "content": [{"type": "image", "image": str(tmp_path / "red.png")}, *PICTURE[0]["content"]]}
    ]
    prompts = open_pictures([named, named, PICTURE, TEXT, "Hello"])
    assert prompts[2:] == [PICTURE, TEXT, "Hello"] and isinstance(named[0]["content"][0]["image"], str)
    first, *rest = prompts[0][0]["content"]
    assert first["image"].getpixel((0, 0)) == (255, 0, 0) and rest == PICTURE[0]["content"]
    with pytest.raises(ValueError, match="Got nowhere.png"):
        open_pictures([[{"role": "user", "content": [{"type": "image", "image": "nowhere.png"}]}]])


@pytest.mark.parametrize(("kind", "attention"), [("gemma3", False), ("gemma4", "vision"), ("gemma4", None)])
def test_pictures_whose_tokens_see_later_ones_are_refused(kind, attention):
    config = make_picture_config(kind)
    config.get_text_config().use_bidirectional_attention = attention
    problem = problem_of_class(skeleton(config))
    assert (problem is None) if attention is None else "cpu_attn.py" in problem


def test_only_a_model_with_a_tower_has_placeholders():
    """Those of classes whose pictures were not compared have them in texts too."""
    processor = SimpleNamespace(image_token_id=7, audio_token_id=None)
    for kind in ("gemma3", "gemma4"):
        assert placeholders_of(skeleton(make_picture_config(kind)), processor) == {7}
    assert placeholders_of(skeleton(make_tiny_config("gemma")), processor) == frozenset()
    # The learner's class of Gemma 3n embeds a tower's tokens otherwise than an engine does.
    model = skeleton(make_picture_config("gemma3"))
    model.config.vision_config.vocab_offset = 316
    assert placeholders_of(model, processor) == {7, 316, 317, 318, 319}


class Engine:
    """`LLM.generate` whose completions are given."""

    def __init__(self, *completions):
        self.completions, self.prompts, self.seeds = iter(completions), [], []

    def generate(self, prompts, parameters, use_tqdm=True):
        self.seeds.append(parameters.seed)
        self.prompts += [prompt["prompt_token_ids"] for prompt in prompts]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=next(self.completions))]) for _ in prompts]


@pytest.mark.parametrize("scores", [False, True])
def test_an_engine_is_sent_one_placeholder_per_picture(scores):
    """Of a text too a sampled placeholder is drawn again. A request that scores its prompt may end in one."""
    first, again = [[PLACEHOLDER], [4], [2, PLACEHOLDER, 3]], [[5, PLACEHOLDER], [6], [8]]
    engine, longer = Engine(*first, *again), ROW + [3]
    rows = [{"prompt_token_ids": ids} for ids in (ROW, [1, 2], longer)]
    rows[0]["multi_modal_data"] = {"image": "a picture"}
    parameters = SimpleNamespace(seed=3, prompt_logprobs=0 if scores else None)
    outputs = with_pictures(engine.generate, frozenset([PLACEHOLDER]))(rows, parameters, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == (first if scores else [[8], [4], [6]])
    assert engine.prompts == [ROW.sent, [1, 2], longer.sent] + [ROW.sent, longer.sent, ROW.sent] * (not scores)
    assert rows[0]["prompt_token_ids"] is ROW
    # With the seed of the first request an engine draws the same tokens again.
    assert engine.seeds == [3] + [None, None] * (not scores) and parameters.seed == 3


def test_a_request_has_the_pixels_of_its_pictures():
    picture = Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    body = picture_request("model", ROW, [picture], n=2)
    assert body["token_ids"] == ROW.sent and body["sampling_params"]["n"] == 2 and body["return_token_ids"]
    (part,) = body["content_parts"]
    data = base64.b64decode(part["url"].removeprefix("data:image/png;base64,"))
    # Processors leave out what is transparent, where a server would put white.
    sent = Image.open(io.BytesIO(data))
    assert sent.mode == "RGB" and [sent.getpixel((x, 0)) for x in (0, 1)] == [(10, 20, 30)] * 2
    assert "content_parts" not in picture_request("model", [1, 2], None)


@pytest.mark.parametrize("has_ids", [False, True], ids=["vLLM 0.31", "vLLM 0.32"])
def test_a_server_is_asked_again_for_one_completion_of_a_prompt(has_ids):
    requests = []

    def post(json):
        requests.append(json)
        tokens = [[PLACEHOLDER], [4]] if json["sampling_params"]["n"] == 2 else [[5]]
        names = [{"token_id": row[0]} if has_ids else {"token": f"token_id:{row[0]}"} for row in tokens]
        logprobs = [{"content": [{**name, "logprob": -1.0, "top_logprobs": []}]} for name in names]
        choices = [{"token_ids": row, "logprobs": found} for row, found in zip(tokens, logprobs, strict=True)]
        return {"prompt_token_ids": list(ROW), "choices": choices}

    answer = complete_prompts(post, "model", [ROW], [None], {"n": 2, "seed": 3}, frozenset([PLACEHOLDER]))
    assert answer == {
        "prompt_ids": [list(ROW)],
        "completion_ids": [[5], [4]],
        "logprobs": [[[-1.0]], [[-1.0]]],
        "logprob_token_ids": [[[5]], [[4]]],
    }
    assert [(r["sampling_params"]["n"], r["sampling_params"]["seed"]) for r in requests] == [(2, 3), (1, None)]
