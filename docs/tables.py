"""Writes the tables of options.md from `trl_qarl/checks/refused.py` and `objectives/tbpo.py`: `python docs/tables.py`."""

import re
import textwrap
from pathlib import Path

from trl_qarl.checks import refused
from trl_qarl.objectives.tbpo import REFUSED_BY_TBPO


PAGE = Path(__file__).with_name("options.md")


def fill(page: str) -> str:
    """The text of the page with what lies between its marks written anew."""
    model_init = {f'model_init_kwargs["{name}"]': why for name, why in refused.MODEL_INIT_KWARGS_REFUSED.items()}
    parts = {
        "every objective": _table(refused.REFUSED | model_init),
        "lora": _table(refused.REFUSED_BY_LORA),
        "tbpo": _table(REFUSED_BY_TBPO),
        "generation_kwargs": _names(refused.GENERATION_KWARGS_THAT_RESHAPE),
        "generation_kwargs with vLLM": _names(refused.VLLM_SAMPLING_KWARGS),
    }
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


def _names(names: frozenset[str]) -> str:
    text = ", ".join(f"`{name}`" for name in sorted(names))
    return textwrap.fill(text, 119, initial_indent="> ", subsequent_indent="> ", break_on_hyphens=False) + "\n"


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text()))
