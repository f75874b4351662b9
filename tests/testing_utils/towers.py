"""Tiny configurations and processors of further classes with a tower, which the zoo trains on text alone."""

from testing_utils import make_tiny_tokenizer
from testing_utils.pictures import _CHAT_TEMPLATE, _GEMMA_TOKENS, _TEXT, _TOWER


_FIRST = 260
"""Id of the first token after those of `make_tiny_tokenizer`."""
_CLIP = _TOWER | {"image_size": 28, "patch_size": 14, "model_type": "clip_vision_model"}
_SIGLIP = _TOWER | {"image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model", "vision_use_head": False}
_WINDOW = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
_GRIDS = [[28, 56], [56, 28]]
_SIZE = {"height": 28, "width": 28}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]}
_GLM_IDS = ("image", "video", "image_start", "image_end", "video_start", "video_end")
_GLM_TOKENS = (
    "<|image|>",
    "<|video|>",
    *(f"<|{end}_of_{kind}|>" for kind in ("image", "video") for end in ("begin", "end")),
)


def _tokenizer(*tokens, **named):
    tokenizer = make_tiny_tokenizer(**named)
    tokenizer.add_tokens([*tokens], special_tokens=True)
    return tokenizer


def _template(placeholder):
    return {"chat_template": _CHAT_TEMPLATE.replace("PICTURE", placeholder)}


def _llava():
    from transformers import CLIPImageProcessor, LlavaConfig, LlavaProcessor

    text = _TEXT | {"model_type": "llama"}
    config = LlavaConfig(text_config=text, vision_config=_CLIP, image_token_index=_FIRST, image_seq_length=4)
    images = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=28)
    options = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return config, LlavaProcessor(images, _tokenizer("<image>"), **options, **_template("<image>"))


def _llava_next():
    import transformers as t

    text = _TEXT | {"model_type": "llama"}
    sizes = {"image_token_index": _FIRST, "image_grid_pinpoints": _GRIDS, "image_seq_length": 4}
    config = t.LlavaNextConfig(text_config=text, vision_config=_CLIP, **sizes)
    images = t.LlavaNextImageProcessor(size={"shortest_edge": 28}, crop_size=_SIZE, image_grid_pinpoints=_GRIDS)
    options = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return config, t.LlavaNextProcessor(images, _tokenizer("<image>"), **options, **_template("<image>"))


def _vipllava():
    import transformers as t

    text, sizes = _TEXT | {"model_type": "llama"}, {"image_token_index": _FIRST, "image_seq_length": 4}
    config = t.VipLlavaConfig(text_config=text, vision_config=_CLIP, vision_feature_layers=[-1, -2], **sizes)
    return config, _llava()[1]


def _lighton_ocr():
    import transformers as t

    text = _TEXT | {"model_type": "qwen3", "head_dim": 32}
    tower = _TOWER | {"image_size": 56, "patch_size": 14, "model_type": "pixtral"}
    config = t.LightOnOcrConfig(text_config=text, vision_config=tower, image_token_id=_FIRST, tie_word_embeddings=True)
    names = {"image": "<|image_pad|>", "image_break": "<|vision_pad|>", "image_end": "<|vision_end|>"}
    tokenizer = _tokenizer(extra_special_tokens={f"{name}_token": token for name, token in names.items()})
    images = t.PixtralImageProcessor(size={"longest_edge": 56}, patch_size=14)
    sizes = {"patch_size": 14, "spatial_merge_size": 2}
    return config, t.LightOnOcrProcessor(images, tokenizer, **sizes, **_template("<|image_pad|>"))


def _llava_onevision():
    import transformers as t

    config = t.LlavaOnevisionConfig(
        text_config=_TEXT | {"model_type": "qwen2"},
        vision_config=_SIGLIP,
        image_token_index=_FIRST,
        video_token_index=_FIRST + 1,
        image_grid_pinpoints=_GRIDS,
    )
    images = t.LlavaOnevisionImageProcessor(size=_SIZE, image_grid_pinpoints=_GRIDS)
    parts = images, _tokenizer("<image>", "<video>"), t.LlavaOnevisionVideoProcessor(size=_SIZE)
    options = {"num_image_tokens": 4, "vision_feature_select_strategy": "full"}
    return config, t.LlavaOnevisionProcessor(*parts, **options, **_template("<image>"))


def _internvl():
    import transformers as t

    config = t.InternVLConfig(
        text_config=_TEXT | {"model_type": "qwen3", "head_dim": 32},
        vision_config=_TOWER | {"image_size": [28, 28], "patch_size": [14, 14]},
        image_token_id=_FIRST + 2,
        image_seq_length=1,
        tie_word_embeddings=False,
    )
    names = {"start_image": "<img>", "end_image": "</img>", "context_image": "<IMG_CONTEXT>", "video": "<video>"}
    tokenizer = _tokenizer(extra_special_tokens={f"{name}_token": token for name, token in names.items()})
    parts = t.GotOcr2ImageProcessor(size=_SIZE), tokenizer, t.InternVLVideoProcessor(size=_SIZE)
    return config, t.InternVLProcessor(*parts, image_seq_length=1, **_template("<IMG_CONTEXT>"))


def _lfm2_vl():
    import transformers as t

    kinds = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "model_type": "lfm2"}
    tower = {"model_type": "siglip2_vision_model", "num_patches": 16, "patch_size": 14, "vision_use_head": False}
    config = t.Lfm2VlConfig(
        text_config=_TEXT | kinds, vision_config=_TOWER | tower, image_token_id=_FIRST, projector_hidden_size=128
    )
    sizes = {"encoder_patch_size": 14, "tile_size": 56, "max_num_patches": 16, "max_image_tokens": 4}
    images = t.Lfm2VlImageProcessor(min_image_tokens=1, **sizes)
    tokenizer = _tokenizer("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")
    return config, t.Lfm2VlProcessor(images, tokenizer, **_template("<image>"))


def _glm(name, **text):
    import transformers as t

    tower = {"depth": 2, "num_heads": 4, "image_size": 28, "patch_size": 14, "out_hidden_size": 128}
    config = getattr(t, f"{name}Config")(
        text_config=_TEXT | {"rope_parameters": _ROPE} | text,
        vision_config=tower | {"hidden_size": 128, "intermediate_size": 256},
        **{f"{kind}_token_id": _FIRST + place for place, kind in enumerate(_GLM_IDS)},
    )
    size = {"shortest_edge": 56**2, "longest_edge": 112**2}
    parts = t.Glm4vImageProcessor(size=size), _tokenizer(*_GLM_TOKENS)
    return config, t.Glm4vProcessor(*parts, t.Glm4vVideoProcessor(size=size), **_template("<|image|>"))


def _glm4v_moe():
    experts = {"moe_intermediate_size": 64, "num_experts_per_tok": 2, "n_routed_experts": 8}
    return _glm("Glm4vMoe", head_dim=32, router_aux_loss_coef=0.0, **experts)


def _exaone4_5():
    import transformers as t

    tower = {"depth": 2, "num_heads": 4, "num_key_value_heads": 2, "fullatt_block_indexes": [1]}
    config = t.Exaone4_5_Config(
        text_config=_TEXT | _WINDOW | {"model_type": "exaone4", "head_dim": 32},
        vision_config=tower | {"hidden_size": 128, "intermediate_size": 256, "out_hidden_size": 128},
        image_token_id=_FIRST,
        video_token_id=_FIRST + 1,
    )
    size = {"shortest_edge": 4 * 14**2, "longest_edge": 24 * 14**2}
    parts = t.Qwen2VLImageProcessor(size=size), _tokenizer("<|image_pad|>", "<|video_pad|>")
    return config, t.Exaone4_5_Processor(*parts, t.Qwen2VLVideoProcessor(size=size), **_template("<|image_pad|>"))


def _gemma4_unified():
    import transformers as t

    names = ("boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_index", "image_token_id", "audio_token_id")
    config = t.Gemma4UnifiedConfig(
        text_config=_TEXT | _WINDOW | {"global_head_dim": 128, "head_dim": 64, "tie_word_embeddings": True},
        # The last one is of releases, for vLLM.
        vision_config={"mm_embed_dim": 128, "output_proj_dims": 128, "mm_posemb_size": 64, "num_soft_tokens": 70},
        audio_config={"audio_embed_dim": 64},
        **{name: _FIRST + place for place, name in enumerate((*names, "video_token_id"))},
    )
    parts = t.Gemma4UnifiedAudioFeatureExtractor(), t.Gemma4UnifiedImageProcessor(max_soft_tokens=70)
    parts += _tokenizer(**_GEMMA_TOKENS), t.Gemma4UnifiedVideoProcessor()
    return config, t.Gemma4UnifiedProcessor(*parts, image_seq_length=70, **_template("<image>"))


TOWERS = {
    "llava": _llava,
    "llava_onevision": _llava_onevision,
    "internvl": _internvl,
    "lfm2_vl": _lfm2_vl,
    "glm4v": lambda: _glm("Glm4v"),
    "glm4v_moe": _glm4v_moe,
    "exaone4_5": _exaone4_5,
    "gemma4_unified": _gemma4_unified,
}
"""Functions that return a configuration with a processor, by kind."""

SHOWN = {
    "llava": _llava,
    "internvl": _internvl,
    "llava_next": _llava_next,
    "vipllava": _vipllava,
    "lighton_ocr": _lighton_ocr,
}
"""Those whose pictures were compared with vLLM's."""


def make_shown_model(directory, kind: str) -> str:
    """Save a random model of a kind in [`SHOWN`] with its processor in `directory/kind`, and return that folder."""
    import torch
    from transformers import AutoModelForImageTextToText

    config, processor = SHOWN[kind]()
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, None, processor.tokenizer.eos_token_id
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory / kind)
    processor.save_pretrained(directory / kind)
    return str(directory / kind)
