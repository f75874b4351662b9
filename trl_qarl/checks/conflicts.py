"""
Options that cannot work together, one row each. The rows are the messages, the cases of the test and
the table of docs/options.md.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS
from transformers.trainer_utils import HubStrategy

from ..engines.http_session import server_urls
from ..options import MUONS
from ..wire.describe import CANARY_TOKENS
from .problems import quote_options
from .values import as_dict


class Conflict(NamedTuple):
    """
    One row: options that conflict, as an `example` for test and documentation; the condition `when` a configuration
    has such; the reason `why`; and the way out, `use`, an imperative. A message quotes the options of `example` and
    `also` with their values.
    """

    example: dict[str, Any]
    when: Callable[[Any], Any]
    why: str
    use: str
    also: tuple[str, ...] = ()


def _is_ahead(config):
    return config.rollout_ahead == 1


def _starts_server(config):
    return config.use_vllm and config.vllm_server_autostart


def _has_own_server(config):
    return config.use_vllm and not config.starts_engine


def _has_other_cache(config):
    cache = as_dict(config, "generation_kwargs").get("cache_implementation", config.cache_implementation)
    is_float32 = as_dict(config, "model_init_kwargs").get("dtype") in (None, "float32", torch.float32)
    return not config.use_vllm and config.bf16 and is_float32 and cache in ALL_STATIC_CACHE_IMPLEMENTATIONS


def _divides_batches(config):
    given = config.accelerator_config
    options = given if isinstance(given, dict) else getattr(given, "__dict__", {})
    return options.get("split_batches") or options.get("dispatch_batches")


def _is_no_host(host):
    return not host or "/" in host or (":" in host and not host.startswith("["))


_BIASED = (
    "vLLM's log-probs would be those of the reshaped distribution, the learner's those of the full one, and every "
    "importance weight would be biased"
)
_NEUTRAL = {"top_p": (0.9, 1.0), "top_k": (50, 0, -1), "min_p": (0.1, None, 0.0), "repetition_penalty": (1.1, 1.0)}
"""A value that reshapes the distribution, and those that do not."""

_TAKE_BFLOAT16 = ("muon_8bit", "adamw_torch_8bit", "adamw_torch_4bit")

CONFLICTS = [
    Conflict(
        {"scheme": "bf16", "quantize_learner": False},
        lambda c: not c.is_quantized and (c.exclude_modules or not c.quantize_learner),
        "this scheme quantizes nothing",
        "Choose a quantized scheme, or remove `quantize_learner` and `exclude_modules`",
        also=("exclude_modules",),
    ),
    Conflict(
        {"fp16": True, "scheme": "w4a16"},
        lambda c: c.fp16 and (c.is_quantized or c.use_cpu),
        "quantized training in float16 underflows to NaN (arXiv 2604.07853), and CPUs compute in float32 instead",
        "Set `bf16=True`, or `bf16=False` for float32, and remove `fp16`",
        also=("use_cpu",),
    ),
    Conflict(
        {"optim": "lomo"},
        lambda c: c.optim in ("lomo", "adalomo"),
        "it writes to the weights during the backward pass, while low-bit weights of the old values are in use",
        "Use 'adamw_8bit' or 'adamw_torch_4bit', which also have a small state",
    ),
    Conflict(
        {"optim": "muon", "optim_args": "momentum=0.9"},
        lambda c: c.optim in MUONS and c.optim_args,
        "Muon has the options `learning_rate`, `weight_decay`, `adam_beta1`, `adam_beta2` and `adam_epsilon`",
        "Remove `optim_args`, or choose another `optim`",
    ),
    Conflict(
        {"gradient_dtype": "bfloat16", "optim": "muon"},
        lambda c: c.gradient_dtype == "bfloat16" and c.optim not in _TAKE_BFLOAT16,
        "this optimizer needs gradients in the dtype of the masters, float32",
        "Use optim='muon_8bit', 'adamw_torch_8bit' or 'adamw_torch_4bit', or gradient_dtype='float32'",
    ),
    Conflict(
        {"cache_implementation": "static", "bf16": True, "use_vllm": False},
        _has_other_cache,
        "a static cache is made in the masters' dtype, float32, and rollouts compute in bfloat16",
        "Remove it, or set `bf16=False`",
    ),
    Conflict(
        {"generation_kwargs": {"stop_strings": ["."]}, "use_vllm": False},
        lambda c: not c.use_vllm and "stop_strings" in as_dict(c, "generation_kwargs"),
        "transformers looks for them with the tokenizer, which TRL does not hand to it",
        "Use `eos_token_id`, or vLLM and `stop`",
    ),
    Conflict(
        {"generation_kwargs": {"stop": ["."]}, "mask_truncated_completions": True, "use_vllm": True},
        lambda c: c.mask_truncated_completions and {"stop", "stop_strings"} & as_dict(c, "generation_kwargs").keys(),
        "a completion that ends at such a string has no end token, so it would count as truncated and be masked",
        "Use `stop_token_ids` with vLLM, or `eos_token_id` without, or mask_truncated_completions=False",
    ),
    Conflict(
        {"generation_kwargs": {"seed": 1}, "use_vllm": True, "vllm_mode": "colocate"},
        lambda c: c.is_colocated and "seed" in as_dict(c, "generation_kwargs"),
        "each completion of a prompt is a request of its own, and all would be equal",
        "Remove it; `seed` is that of the training",
    ),
    Conflict(
        {"dataloader_persistent_workers": True, "dataloader_num_workers": 0},
        lambda c: c.dataloader_persistent_workers and not c.dataloader_num_workers,
        "there are no workers that could stay",
        "Set `dataloader_num_workers`, or remove `dataloader_persistent_workers`",
    ),
    Conflict(
        {"accelerator_config": {"split_batches": True}},
        _divides_batches,
        "accelerate would divide a generation batch once more, although TRL gives each process its own",
        "Leave out `split_batches` and `dispatch_batches`",
    ),
    Conflict(
        {"save_strategy": "best"},
        lambda c: c.save_strategy == "best" and (c.metric_for_best_model is None or c.eval_strategy == "no"),
        "the best checkpoint is that with the best metric of an evaluation",
        "Give `eval_strategy` and metric_for_best_model='eval_reward'",
        also=("metric_for_best_model", "eval_strategy"),
    ),
    Conflict(
        {"hub_strategy": "checkpoint", "push_to_hub": True},
        lambda c: c.push_to_hub and c.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS),
        "only the policy is pushed, because a repository with masters next to it loads as another model",
        "Use 'every_save' or 'end', and upload checkpoints yourself: hf upload USER/NAME-checkpoints out/checkpoint-10",
    ),
    *(
        Conflict(
            {name: value, "use_vllm": True},
            lambda c, name=name, neutral=neutral: c.use_vllm and getattr(c, name) not in neutral,
            _BIASED,
            f"Use {neutral[0]!r}; `temperature` applies to both",
        )
        for name, (value, *neutral) in _NEUTRAL.items()
    ),
    Conflict(
        {"vllm_structured_outputs_regex": "a+", "use_vllm": True},
        lambda c: c.use_vllm and c.vllm_structured_outputs_regex is not None,
        "masked tokens change sampling log-probs, and the learner's are of the full distribution",
        "Remove `vllm_structured_outputs_regex`",
    ),
    Conflict(
        {"vllm_model_impl": "transformers", "use_vllm": True},
        lambda c: c.use_vllm and c.vllm_model_impl not in ("vllm", "auto"),
        "the audit knows only the parameters of vLLM's own models",
        "Use 'vllm'",
    ),
    Conflict(
        {"vllm_max_model_length": CANARY_TOKENS, "use_vllm": True},
        lambda c: c.use_vllm and c.vllm_max_model_length is not None and c.vllm_max_model_length <= CANARY_TOKENS,
        f"a fixed text of {CANARY_TOKENS} tokens is scored after each publication, to compare engine and learner",
        f"Use at least {CANARY_TOKENS + 1}",
    ),
    Conflict(
        {"vllm_server_base_url": "https://host:8000"},
        lambda c: not all(re.match(r"http://[^/]", url) for url in server_urls(c.vllm_server_base_url)),
        "a server of `trl-qarl vllm-serve` has no other form than 'http://HOST:PORT'",
        "For encryption, set 'http://127.0.0.1:8000' and forward that port: `ssh -N -L 8000:127.0.0.1:8000 HOST`",
    ),
    Conflict(
        {"vllm_token_file": "token", "use_vllm": True, "vllm_mode": "colocate"},
        lambda c: c.vllm_token_file is not None and not _has_own_server(c),
        "the file is for a server that you start yourself",
        "Remove `vllm_token_file`",
        also=("vllm_server_autostart",),
    ),
    Conflict(
        {"vllm_server_autostart": True, "vllm_mode": "colocate", "use_vllm": True},
        lambda c: (
            c.vllm_server_autostart and not (c.use_vllm and c.vllm_mode == "server" and c.vllm_server_base_url is None)
        ),
        "a server is started on this machine, under an address of its own",
        "Set use_vllm=True and vllm_mode='server', and choose its port with `vllm_server_port`",
        also=("vllm_server_base_url",),
    ),
    Conflict(
        {"vllm_server_host": "http://10.0.0.7", "use_vllm": True, "vllm_mode": "server"},
        lambda c: _has_own_server(c) and c.vllm_server_base_url is None and _is_no_host(c.vllm_server_host),
        "it is a name or an address, to which 'http://' and `vllm_server_port` are added",
        "Give it alone, or vllm_server_base_url='http://HOST:PORT'",
    ),
    Conflict(
        {"vllm_server_host": "10.0.0.7", "vllm_server_autostart": True, "use_vllm": True, "vllm_mode": "server"},
        lambda c: _starts_server(c) and c.vllm_server_host not in ("0.0.0.0", "127.0.0.1", "localhost"),
        "the server is started on this machine and listens on 127.0.0.1",
        "Remove `vllm_server_host`",
    ),
    Conflict(
        {"rollout_ahead": 1, "use_vllm": False},
        lambda c: _is_ahead(c) and not (c.use_vllm and c.vllm_mode == "server"),
        "an engine in the trainer's process and the learner take turns",
        "Set use_vllm=True and vllm_mode='server', or remove `rollout_ahead`",
        also=("vllm_mode",),
    ),
    Conflict(
        {"rollout_ahead": 1, "precisions": [4, 3], "use_vllm": True, "vllm_mode": "server"},
        lambda c: _is_ahead(c) and (c.precisions is not None or not c.quantize_learner),
        "a batch is drawn at the bits of the one before, and its old log-probs need the low-bit weights that drew it",
        "Leave out `rollout_ahead`, or `precisions` and `quantize_learner`",
        also=("quantize_learner",),
    ),
]


def problems_of_conflicts(config: Any) -> Iterator[str]:
    """Yield the message of each row that applies to a configuration."""
    for row in CONFLICTS:
        if row.when(config):
            yield f"{quote_options(config, *row.example, *row.also)}: {row.why}. {row.use}."
