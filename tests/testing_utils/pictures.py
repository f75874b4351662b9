"""
Tiny random models of pictures and text with their processors, prompts with drawn pictures, and trainers of both.

Every processor of transformers 5.17 for these classes imports torchvision, which .ci/setup installs for tests.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from testing_utils import SPECIAL_TOKENS, make_tiny_tokenizer, make_trainer, spread


KINDS = ("idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma4", "mistral3", "qwen3_5")
"""Classes whose pictures were compared with vLLM's."""

KINDS_OF_TEXT = ("gemma3", "qwen3_vl_moe", "qwen3_5_moe")
"""Further classes, compared on text alone."""

needs_torchvision = pytest.mark.skipif(find_spec("torchvision") is None, reason="needs torchvision: .ci/setup")


_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}PICTURE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TEXT = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
_TOWER = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}


_QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_IDEFICS_TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
_IDEFICS_TOKENS += [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
_GEMMA_TOKENS = {f"{name}_token": f"<{name}>" for name in ("boi", "eoi", "boa", "eoa", "image", "audio")}
_MISTRAL_TOKENS = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
_NAMES = {
    "gemma3": "Gemma3",
    "gemma4": "Gemma4",
    "idefics3": "Idefics3",
    "mistral3": "Mistral3",
    "smolvlm": "SmolVLM",
    "qwen2_vl": "Qwen2VL",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
}


def _class(kind, part):
    import transformers

    return getattr(transformers, f"{_NAMES[kind]}{part}")


def _first_id():
    return len(make_tiny_tokenizer())


def make_picture_config(kind: str):
    """Configuration of a model with two layers in the language model and two in the tower."""
    if kind in ("gemma3", "gemma4", "mistral3"):
        return _other_config(kind)
    if not kind.startswith("qwen"):
        return _class(kind, "Config")(
            text_config=_TEXT | {"model_type": "llama"},
            vision_config=_TOWER | {"image_size": 28, "patch_size": 14},
            scale_factor=2,
            image_token_id=_first_id(),
            tie_word_embeddings=False,
            pad_token_id=0,
        )
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
    tower = {"depth": 2, "num_heads": 4, "hidden_size": 128, "intermediate_size": 256, "out_hidden_size": 128}
    text = dict(_TEXT)
    if kind == "qwen2_vl":
        tower = {"depth": 2, "num_heads": 4, "embed_dim": 128, "hidden_size": 128, "mlp_ratio": 2}
    elif kind == "qwen2_5_vl":
        tower |= {"fullatt_block_indexes": [1]}
    else:
        tower |= {"patch_size": 16, "deepstack_visual_indexes": [0], "num_position_embeddings": 64}
        rope |= {"mrope_interleaved": True}
        text |= {"head_dim": 32}
        if kind.endswith("moe"):
            text |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
            text |= {} if kind == "qwen3_vl_moe" else {"shared_expert_intermediate_size": 64}
        if kind.startswith("qwen3_5"):
            # vLLM's kernels for CPUs have heads of 128 only.
            tower.pop("deepstack_visual_indexes")
            rope |= {"partial_rotary_factor": 0.25, "mrope_section": [8, 4, 4]}
            text |= {"head_dim": 128, "layer_types": ["linear_attention", "full_attention"]}
            text |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = dict(zip(names, range(_first_id(), _first_id() + 4), strict=True))
    text_config = text | {"rope_parameters": rope}
    return _class(kind, "Config")(text_config=text_config, vision_config=tower, tie_word_embeddings=False, **ids)


def _other_config(kind: str):
    first, text = _first_id(), _TEXT | {"head_dim": 64, "tie_word_embeddings": True}
    window = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    if kind == "mistral3":
        text |= {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False}
        tower = _TOWER | {"image_size": 56, "patch_size": 14, "model_type": "pixtral"}
        ids = {"image_token_index": first, "tie_word_embeddings": False}
    elif kind == "gemma3":
        text |= window | {"query_pre_attn_scalar": 64}
        tower = _TOWER | {"image_size": 56, "patch_size": 14, "vision_use_head": False}
        ids = {"boi_token_index": first, "eoi_token_index": first + 1, "image_token_index": first + 4}
        ids |= {"mm_tokens_per_image": 4}
    else:
        text |= window | {"global_head_dim": 128, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 32}
        text |= {"vocab_size_per_layer_input": text["vocab_size"]}
        tower = _TOWER | {"num_key_value_heads": 4, "head_dim": 32, "default_output_length": 70}
        names = ("boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_index", "image_token_id", "audio_token_id")
        ids = {name: first + place for place, name in enumerate((*names, "video_token_id"))}
    return _class(kind, "Config")(text_config=text, vision_config=tower, **ids)


def _other_processor(kind: str):
    import transformers

    tokenizer = make_tiny_tokenizer()
    if kind == "mistral3":
        tokenizer.add_tokens(_MISTRAL_TOKENS, special_tokens=True)
        images = transformers.PixtralImageProcessor(size={"longest_edge": 56}, patch_size=14)
        template = _CHAT_TEMPLATE.replace("PICTURE", "[IMG]")
        return transformers.PixtralProcessor(
            images, tokenizer, patch_size=14, spatial_merge_size=2, chat_template=template
        )
    tokenizer = make_tiny_tokenizer(**_GEMMA_TOKENS)
    if kind == "gemma3":
        # vLLM looks them up (gemma3_mm.py).
        tokenizer.add_tokens(["\n" * count for count in range(1, 5)])
        images = transformers.Gemma3ImageProcessor(size={"height": 56, "width": 56})
        template = _CHAT_TEMPLATE.replace("PICTURE", "<boi>")
        return transformers.Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)
    return transformers.Gemma4Processor(
        transformers.Gemma4AudioFeatureExtractor(),
        transformers.Gemma4ImageProcessor(max_soft_tokens=70),
        tokenizer,
        transformers.Gemma4VideoProcessor(),
        chat_template=_CHAT_TEMPLATE.replace("PICTURE", "<image>"),
        image_seq_length=70,
    )


def make_picture_processor(kind: str):
    """
    Its processor. Those of Qwen make 1 to 6 tokens of a picture, the others a token of each tile of 28 pixels, and one
    of the whole.
    """
    import transformers

    if kind in ("gemma3", "gemma4", "mistral3"):
        return _other_processor(kind)
    is_qwen = kind.startswith("qwen")
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens(_QWEN_TOKENS if is_qwen else _IDEFICS_TOKENS, special_tokens=True)
    placeholder = "<|vision_start|><|image_pad|><|vision_end|>" if is_qwen else "<image>"
    template = _CHAT_TEMPLATE.replace("PICTURE", placeholder)
    if is_qwen:
        is_third = kind.startswith("qwen3")
        patch = 16 if is_third else 14
        size = {"shortest_edge": 4 * patch**2, "longest_edge": 24 * patch**2}
        videos = transformers.Qwen3VLVideoProcessor if is_third else transformers.Qwen2VLVideoProcessor
        parts = [transformers.Qwen2VLImageProcessor(size=size, patch_size=patch), tokenizer, videos(size=size)]
        # Releases of Qwen3.5 have Qwen3-VL's.
        return _class("qwen3_vl" if is_third else kind, "Processor")(*parts, chat_template=template)
    images = _class(kind, "ImageProcessor")(
        size={"longest_edge": 56}, max_image_size={"longest_edge": 28}, do_image_splitting=True
    )
    parts = [images, tokenizer, *([transformers.SmolVLMVideoProcessor()] if kind == "smolvlm" else [])]
    return _class(kind, "Processor")(*parts, image_seq_len=1, chat_template=template)


def make_picture_model(kind: str, seed: int = 0):
    """A random model in float32 whose weights are large enough for a picture to change what follows it."""
    import torch

    config = make_picture_config(kind)
    for part in (config, config.get_text_config()):
        part.pad_token_id, part.bos_token_id, part.eos_token_id = 0, None, SPECIAL_TOKENS.index("<|im_end|>")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _class(kind, "ForConditionalGeneration")(config).float()
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                torch.nn.init.xavier_uniform_(parameter, gain=1.5)
            elif name.endswith(".bias"):
                torch.nn.init.normal_(parameter, std=0.02)
        embedding = model.get_input_embeddings().weight
        # A tied head that large would repeat the last token.
        is_tied = model.get_output_embeddings().weight is embedding
        torch.nn.init.normal_(embedding, std=embedding.shape[1] ** -0.5 if is_tied else 1.0)
        # So that placeholders are sampled, which the learner's forward would take for pictures.
        with torch.no_grad():
            model.get_output_embeddings().weight[config.image_token_id :][:1] *= 2.0
    return model


def make_tiny_picture_model(directory, kind: str, seed: int = 0) -> str:
    """Save a model of a kind in [`KINDS`] with its processor in `directory/kind` and return that folder."""
    path = Path(directory) / kind
    make_picture_model(kind, seed).save_pretrained(path)
    processor = make_picture_processor(kind)
    assert len(processor.tokenizer) <= _TEXT["vocab_size"]
    processor.save_pretrained(path)
    return str(path)


def draw(number: int, size=(56, 42)):
    """A picture of random pixels."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def make_picture_problems(num_rows: int = 8, sizes=((56, 42),)):
    """A dataset of prompts, each with a picture of each of `sizes`."""
    from datasets import Dataset, Image, List

    rows = {
        "prompt": [[{"role": "user", "content": f"Picture {i}?"}] for i in range(num_rows)],
        "images": [[draw(10 * i + j, size) for j, size in enumerate(sizes)] for i in range(num_rows)],
    }
    return Dataset.from_dict(rows).cast_column("images", List(Image()))


def make_mixed_problems(num_rows=8):
    """A dataset in which every other prompt has no picture, and the others have two of different sizes."""
    problems = make_picture_problems(num_rows, sizes=((56, 42), (84, 28)))
    return problems.map(
        lambda row, number: {"images": row["images"] if number % 2 else []},
        with_indices=True,
        features=problems.features,
    )


def make_picture_trainer(model, output_dir, train_dataset=None, **arguments):
    """A [`QaRLTrainer`] in float32, by default with a colocated vLLM."""
    defaults = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "bf16": False,
        "vllm_max_model_length": 256,
        "num_generations": 2,
        "steps_per_generation": 1,
        "max_steps": 3,
        "lr_scheduler_type": "constant",
        "model_init_kwargs": {"dtype": "float32"} if isinstance(model, str) else None,
    }
    return make_trainer(model, output_dir, spread, train_dataset or make_picture_problems(), **(defaults | arguments))
