"""
Prompts with pictures: token ids for learner and engine, supported model classes, and the picture of the canary.

The learner's processor replaces the placeholder of a picture by one placeholder for each of its patches, or by rows of
tiles. A vLLM engine expands the received token ids in the same way, so one placeholder for each picture is sent
(https://github.com/huggingface/trl/issues/6294). The engine returns its own prompt with the completions, which must
equal the learner's, token by token.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from ..models import family_of, with_fact
from ..quantization.names import architecture, has_tower
from ..wire.describe import sample_token_ids
from ..wire.protocol import PublishError
from .answers import BadAnswer


PICTURE_PATH = "/inference/v1/generate"
"""Path of vLLM's server for token ids with pictures, available with `--enable-scale-out`."""

MAX_DRAWS = 50
# Requests to a server at the same time.
_MAX_REQUESTS = 64


def takes_pictures(model: nn.Module) -> bool:
    """Return whether the pictures of a model's class were compared with vLLM's, and are the same there."""
    return problem_of_class(model) is None


def problem_of_class(model: nn.Module) -> str | None:
    """Return the reason why a model cannot be trained on pictures with vLLM, or `None`."""
    name = architecture(model)
    is_compared = family_of(name).has_compared_pictures
    attention = is_compared and getattr(model.config.get_text_config(), "use_bidirectional_attention", None)
    # The second are the larger Gemma 4.
    if name == "Gemma3ForConditionalGeneration" or attention == "vision":
        reason = (
            "tokens of a picture attend to later ones of it, which vLLM's attention for CPUs leaves out (v1/attention/backends/cpu_attn.py), "
            "and GPUs are untested"
        )
    elif not is_compared:
        reason = "its pictures in vLLM were not compared with the learner's"
    else:
        return None
    compared = ", ".join(with_fact("has_compared_pictures"))
    return f"{name} with pictures and use_vllm=True: {reason}. Use one of {compared}, or use_vllm=False."


class ExpandedPrompt(list):
    """Token `ids` of a prompt for the learner, with all placeholders of the processor; `sent` are the token ids for an
    engine, with one placeholder for each picture."""

    def __init__(self, ids: Sequence[int], sent: Sequence[int]):
        super().__init__(ids)
        self.sent = list(sent)

    def __add__(self, more):
        # TRL appends completions and results of tools.
        return ExpandedPrompt([*self, *more], [*self.sent, *more])


def sent_ids(prompt: list[int]) -> list[int]:
    """Return the token ids of a prompt, with pictures or without, to send to an engine."""
    return getattr(prompt, "sent", prompt)


def check_prompt(theirs: list[int] | None, ours: list[int]) -> None:
    """Raise [`PublishError`] unless the prompt computed by an engine equals the learner's."""
    if theirs != ours:
        made = "nothing" if theirs is None else f"{len(theirs)} tokens {theirs}"
        raise PublishError(
            f"The engine makes another prompt of the same picture and text: {made}, the learner {len(ours)} tokens {ours}. Its image "
            "processor or its input differs from the learner's."
        )


def count_pictures(prompts: Sequence[Any]) -> list[int]:
    """Return the number of pictures of each prompt."""
    messages = [prompt if isinstance(prompt, list) else [] for prompt in prompts]
    parts = [[part for message in prompt for part in message.get("content") or ()] for prompt in messages]
    return [sum(isinstance(part, dict) and part.get("type") == "image" for part in row) for row in parts]


def open_pictures(prompts: Sequence[Any]) -> list[Any]:
    """Return `prompts` with pictures in place of texts that name them, by path, address or base64: an engine takes no
    texts, and the learner's processor might decode them otherwise."""
    from transformers.image_utils import load_image

    load = cache(load_image)

    def opened(part: Any) -> Any:
        is_text = isinstance(part, dict) and part.get("type") == "image" and isinstance(part.get("image"), str)
        return {**part, "image": load(part["image"])} if is_text else part

    def with_open(message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        return {**message, "content": [*map(opened, content)]} if isinstance(content, list) else message

    return [[*map(with_open, prompt)] if isinstance(prompt, list) else prompt for prompt in prompts]


def check_rows(counts: Sequence[int], processing_class: Any, num_processes: int) -> None:
    """Raise `ValueError` if only some prompts of all processes have pictures, by their `counts`. Allowed is a single
    process with a processor that returns grids of patches, such as Qwen's, by which TRL splits rows."""
    if 0 not in counts or not any(counts):
        return
    image_processor = getattr(processing_class, "image_processor", None)
    if "image_grid_thw" not in getattr(image_processor, "model_input_names", ()):
        reason = f"{type(processing_class).__name__} pads rows, and TRL 1.16 splits them by their numbers of pictures"
    elif num_processes > 1:
        reason = f"a process without pictures would not compute the vision tower, and the other {num_processes - 1} would wait for it"
    else:
        return
    raise ValueError(
        f"prompt {counts.index(0)} of {len(counts)} has no picture, but others in its generation batch do: {reason}. Give every row a "
        "picture, or train on rows with and without pictures one after the other."
    )


def expanded_prompts(
    prompt_ids: Sequence[Sequence[int]], texts: Sequence[str], tokenizer: Any
) -> list[ExpandedPrompt]:
    """Build prompts from the processor's token ids and the chat template's texts, which have one placeholder for each
    picture."""
    prompts = []
    for ids, text in zip(prompt_ids, texts, strict=True):
        # As in processors: either the template or the tokenizer adds the first special token.
        has_bos = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        prompts.append(ExpandedPrompt(ids, tokenizer(text, add_special_tokens=not has_bos)["input_ids"]))
    return prompts


def placeholders_of(model: nn.Module, processing_class: Any) -> frozenset[int]:
    """Return the token ids that stand for pictures, videos and sound; none for a model of text. For each of them
    Gemma 4 takes the embedding of padding, also in a text, and Gemma 3n, in a learner, one of its towers', as for all
    that follow the first of a tower."""
    kinds = ("image", "video", "audio") if has_tower(model) else ()
    ids = {getattr(processing_class, f"{kind}_token_id", None) for kind in kinds}
    towers = [getattr(model.config, f"{kind}_config", None) for kind in ("vision", "audio") if kinds]
    if offsets := [tower.vocab_offset for tower in towers if hasattr(tower, "vocab_offset")]:
        ids.update(range(min(offsets), model.config.get_text_config().vocab_size))
    return frozenset(ids - {None})


def engine_arguments(model: nn.Module) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` with which an engine sees the same pictures as the learner; none for a model
    of text."""
    # Some processors would leave normalization to buffers of vLLM's model, which no weight sync fills.
    if not has_tower(model):
        return {}
    return {"mm_device_do_normalize": False, "limit_mm_per_prompt": {"video": 0}}


def draw_again(
    outputs: list,
    tokens_of: Callable[[Any], Sequence[int]],
    placeholders: frozenset[int],
    draw: Callable[[list[int]], Sequence],
) -> list:
    """
    Replace completions with a sampled placeholder, which the learner would take for a picture: `draw` returns new
    completions for a list of places, and is called at most [`MAX_DRAWS`] times. A trained model gives placeholders no
    probability; a model with random weights and a small vocabulary does.
    """
    for _ in range(MAX_DRAWS):
        places = [place for place, output in enumerate(outputs) if not placeholders.isdisjoint(tokens_of(output))]
        if not places:
            return outputs
        for place, output in zip(places, draw(places), strict=True):
            outputs[place] = output
    tokens = list(tokens_of(outputs[places[0]]))
    position = next(position for position, token in enumerate(tokens) if token in placeholders)
    raise BadAnswer(
        f"completion {places[0]} of {len(outputs)}, token {position} of {len(tokens)}: {tokens[position]} is the placeholder of a picture, "
        f"which the learner cannot score. It was sampled {MAX_DRAWS} times, so the policy has learned to write it."
    )


def with_pictures(generate: Callable[..., list], placeholders: frozenset[int]) -> Callable[..., list]:
    """Return an `LLM.generate` that sends one placeholder for each picture, and uses [`draw_again`]."""

    def generate_with_pictures(prompts, sampling_params, **kwargs):
        prompts = [{**prompt, "prompt_token_ids": sent_ids(prompt["prompt_token_ids"])} for prompt in prompts]
        outputs = generate(prompts, sampling_params, **kwargs)
        # A request for log-probs of its prompt keeps nothing of its completion.
        if getattr(sampling_params, "prompt_logprobs", 0) is not None:
            return outputs
        # With the seed of a request the same tokens would be drawn again.
        unseeded = copy(sampling_params)
        unseeded.seed = None
        return draw_again(
            outputs,
            lambda output: output.outputs[0].token_ids,
            placeholders,
            lambda places: generate([prompts[place] for place in places], unseeded, **kwargs),
        )

    return generate_with_pictures


def picture_request(model: str, prompt: list[int], pictures: Sequence[Any] | None, **sampling: Any) -> dict[str, Any]:
    """Return the body of a request to [`PICTURE_PATH`]; the response has the expanded prompt. `model` is the server's
    name of its model, `sampling` are parameters of `vllm.SamplingParams`."""
    body = {
        "model": model,
        "token_ids": list(sent_ids(prompt)),
        "return_token_ids": True,
        # By default a choice is lost if another one ends later (https://github.com/vllm-project/vllm/pull/52399).
        "sampling_params": {**sampling, "output_kind": 2},
    }
    if pictures:
        from trl.generation.vllm_client import pil_to_base64  # imports vLLM

        # Processors drop transparency; the server would put a white background behind it.
        encoded = [pil_to_base64(picture.convert("RGB")) for picture in pictures]
        body["content_parts"] = [{"type": "image_url", "url": f"data:image/png;base64,{data}"} for data in encoded]
    return body


def complete_prompts(
    post: Callable[..., dict[str, Any]],
    model: str,
    prompts: Sequence[list[int]],
    pictures: Sequence[Sequence[Any] | None],
    sampling: Mapping[str, Any],
    placeholders: frozenset[int],
) -> dict[str, Any]:
    """Have a server complete prompts by [`picture_request`], which `post` sends to [`PICTURE_PATH`]. Return a result
    like that of TRL's client, with the server's prompts."""
    from trl.generation.vllm_client import parse_logprobs  # imports vLLM

    num_each = sampling["n"]

    def draw(place: int, **changed: Any) -> dict[str, Any]:
        return post(json=picture_request(model, prompts[place], pictures[place], **{**sampling, **changed}))

    with ThreadPoolExecutor(min(_MAX_REQUESTS, len(prompts))) as executor:
        answers = list(executor.map(draw, range(len(prompts))))
    choices = draw_again(
        [choice for answer in answers for choice in answer["choices"]],
        itemgetter("token_ids"),
        placeholders,
        lambda places: [draw(place // num_each, n=1, seed=None)["choices"][0] for place in places],
    )
    logprobs, logprob_token_ids = parse_logprobs([_with_tokens(choice["logprobs"]) for choice in choices])
    return {
        "prompt_ids": [answer["prompt_token_ids"] for answer in answers],
        "completion_ids": [choice["token_ids"] for choice in choices],
        "logprobs": logprobs,
        "logprob_token_ids": logprob_token_ids,
    }


def _with_tokens(logprobs: dict[str, Any]) -> dict[str, Any]:
    """Return the log-probs of a choice as TRL 1.16 reads them: from 0.32 on vLLM names tokens by `token_id` alone."""

    def named(entry: dict[str, Any]) -> dict[str, Any]:
        return {"token": f"token_id:{entry['token_id']}", **entry} if "token_id" in entry else entry

    content = [named(entry) | {"top_logprobs": [*map(named, entry["top_logprobs"])]} for entry in logprobs["content"]]
    return {**logprobs, "content": content}


def canary_prompt(processor: Any, num_tokens: int) -> tuple[ExpandedPrompt, Mapping[str, torch.Tensor], list]:
    """Return a prompt of a picture followed by a text of about `num_tokens` tokens, the tensors of the picture for the
    learner's forward, and the picture: a gradient in three colours, with sides of different length."""
    from PIL import Image

    ramp = Image.linear_gradient("L")
    bands = ramp, ramp.transpose(Image.Transpose.ROTATE_90), ramp.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    picture = Image.merge("RGB", bands).resize((112, 84))
    text = processor.tokenizer.decode(sample_token_ids(processor.tokenizer)[:num_tokens])
    content = [{"type": "image", "image": picture}, {"type": "text", "text": text}]
    conversation = [[{"role": "user", "content": content}]]
    inputs = processor.apply_chat_template(conversation, tokenize=True, return_dict=True, return_tensors="pt")
    texts = processor.apply_chat_template(conversation, tokenize=False)
    (prompt,) = expanded_prompts(inputs.pop("input_ids").tolist(), texts, processor.tokenizer)
    return prompt, dict(inputs), [picture]
