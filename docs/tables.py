"""
Writes the tables of options.md from `trl_qarl/checks/` and `trl_qarl/objectives/tbpo.py`, the one of
health.md from `trl_qarl/telemetry/advisor.py`, and the one of schemes.md from `trl_qarl/engines/gpu_kernels.py`:
`python docs/tables.py`.
"""

import re
import textwrap
from pathlib import Path

from trl_qarl.checks import refused
from trl_qarl.checks.conflicts import CONFLICTS
from trl_qarl.engines.gpu_kernels import RELEASES, Gpu, choose_kernels
from trl_qarl.objectives.tbpo import REFUSED_BY_TBPO
from trl_qarl.quantization.schemes import SCHEMES
from trl_qarl.telemetry import advisor


DOCS = Path(__file__).parent


def fill() -> dict[Path, str]:
    """Return the text of each page with what lies between its marks written anew."""
    pages = {"options.md": _options(), "health.md": {"rules": _rules()}, "schemes.md": {"kernels": _kernels()}}
    return {DOCS / name: _replace((DOCS / name).read_text(), parts) for name, parts in pages.items()}


def _options() -> dict[str, str]:
    model_init = {f'model_init_kwargs["{name}"]': why for name, why in refused.MODEL_INIT_KWARGS_REFUSED.items()}
    return {
        "every objective": _table(refused.REFUSED | model_init),
        "conflicts": _conflicts(),
        "lora": _table(refused.REFUSED_BY_LORA),
        "tbpo": _table(REFUSED_BY_TBPO),
        "generation_kwargs": _names(refused.GENERATION_KWARGS_THAT_RESHAPE),
        "generation_kwargs with vLLM": _names(refused.VLLM_SAMPLING_KWARGS),
    }


def _replace(page: str, parts: dict[str, str]) -> str:
    for name, text in parts.items():
        page, count = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)",
            lambda match, text=text: match[1] + text + match[2],
            page,
            flags=re.S,
        )
        assert count == 1, name
    return page


def _table(options: dict[str, str]) -> str:
    reasons: dict[str, list[str]] = {}
    for name, why in options.items():
        reasons.setdefault(why, []).append(f"`{name}`")
    rows = "".join(f"| {', '.join(names)} | {why} |\n" for why, names in reasons.items())
    return f"| option | why, and what to do |\n|---|---|\n{rows}"


def _conflicts() -> str:
    """Return one row for each reason and way out, with the options of all examples."""
    rows: dict[tuple[str, str], list[str]] = {}
    for row in CONFLICTS:
        options = ", ".join(f"`{name}={value!r}`" for name, value in row.example.items())
        rows.setdefault((row.why, row.use), []).append(options)
    lines = "".join(f"| {'; '.join(options)} | {why} | {use} |\n" for (why, use), options in rows.items())
    return f"| options | why | what to do |\n|---|---|---|\n{lines}"


def _names(names: frozenset[str]) -> str:
    text = ", ".join(f"`{name}`" for name in sorted(names))
    return textwrap.fill(text, 119, initial_indent="> ", subsequent_indent="> ", break_on_hyphens=False) + "\n"


def _kernels() -> str:
    """Return the kernels of linear layers and of experts by scheme and compute capability."""
    gpus = {
        "8.0 to 8.7 (A100, RTX 30)": (8, 0),
        "8.9 (L40S, RTX 40)": (8, 9),
        "9.0 (H100, H200)": (9, 0),
        "10.x (B200)": (10, 0),
        "12.x (RTX 50, RTX PRO)": (12, 0),
    }

    def cell(scheme, capability, of_experts):
        releases = [choose_kernels(scheme, Gpu(capability, vllm=f"{release}.0")) for release in RELEASES]
        [(kernels, refusal)] = {(c.experts if of_experts else c.linear, c.refusal) for c in releases}
        return "refused" if refusal else " or ".join(k.removesuffix("LinearKernel") for k in kernels)

    rows: dict[str, list[str]] = {}
    for of_experts in (False, True):
        for name, scheme in SCHEMES.items():
            # Others are refused for experts on every device.
            if scheme.is_quantized and (not of_experts or name in ("w4a16", "w8a8", "fp8")):
                cells = " | ".join(cell(scheme, capability, of_experts) for capability in gpus.values())
                rows.setdefault(cells, []).append(f"experts in `{name}`" if of_experts else f"`{name}`")
    head = f"| scheme | {' | '.join(gpus)} |\n|{'---|' * (len(gpus) + 1)}\n"
    return head + "".join(f"| {', '.join(names)} | {cells} |\n" for cells, names in rows.items())


def _rules() -> str:
    """Return one or several rows for each rule of the advisor, with its thresholds."""
    (low, high), most, flips = (
        advisor.DROPPED_AIM,
        advisor.DROPPED_MOST,
        f"{advisor.STALLED_FLIP_RATE:.0e}".replace("e-0", "e-"),
    )
    fine16, bad16 = advisor.mismatch_bands({"scheme": "w4a16"})
    fine8, bad8 = advisor.mismatch_bands({"scheme": "w8a8"})
    rows = {
        "_learning": [
            "**Learning**: `reward`, last quarter against first | rises by more than its noise | does not | falls by more | "
            "`learning_rate`, an earlier checkpoint"
        ],
        "_mismatch": [
            f"**Aligned**: `mismatch/abs_logp_mean`, 16-bit activations | up to {fine16:g} | up to {bad16:g} | above | "
            "`quantize_learner=True`; [more](#the-mismatch-is-large)",
            f'the same, 8-bit activations | up to {fine8:g} | up to {bad8:g} | above | another scheme, `numerics="engine"`',
            'the same, `numerics="engine"` | 0 | - | above 0 | the log names the place',
        ],
        "_dropped": [
            f"**Updating**: `tbpo/dropped/total` | {100 * low:g} to {high:.0%} | less, or more | above {most:.0%} | "
            "[bands](#almost-all-completions-are-dropped), `learning_rate`, updates per batch"
        ],
        "_flips": [
            f"**Updating**: `quant/code_flip_rate` | from {flips} | below in every update so far | below for "
            f"{advisor.STALLED_UPDATES} updates | [`learning_rate`, float32 masters](#updates-do-not-reach-the-low-bit-weights)"
        ],
        "_effective": [
            f"**Effective samples**: `mismatch/effective_sample_size` | from {advisor.EFFECTIVE_FINE:.0%} | from "
            f"{advisor.EFFECTIVE_BAD:.0%} | below | the mismatch, `mismatch_cap`"
        ],
        "_entropy": [
            f"**Entropy**: last quarter against first | {advisor.ENTROPY_LEFT:g} to {advisor.ENTROPY_UP:g} times | less, or more | "
            f"above {advisor.ENTROPY_FAR_UP:g} times | completions, `temperature`"
        ],
        "_text": [
            f"**Sound text**: `rollout/repetition_share`, `garbled_share` | up to {advisor.UNSOUND_WATCH:.0%} | up to "
            f"{advisor.UNSOUND_BAD:.0%} | above | completions, the reward"
        ],
        "_zero_spread": [
            f"**Reward spread**: `frac_reward_zero_std` | up to {advisor.ZERO_SPREAD_WATCH:.0%} | up to "
            f"{advisor.ZERO_SPREAD_BAD:.0%} | above | [other problems, `num_generations`](#the-reward-does-not-rise)"
        ],
    }
    lines = [row.replace("%", " %") for rule in advisor.RULES.values() for row in rows[rule.__name__]]
    head = "| metric | fine | look at it | not healthy | what helps |\n|---|---|---|---|---|\n"
    return head + "".join(f"| {line} |\n" for line in lines)


if __name__ == "__main__":
    for path, text in fill().items():
        path.write_text(text)
