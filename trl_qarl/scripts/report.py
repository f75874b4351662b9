"""`trl-qarl report`: one page with drawings of reward, mismatch, dropped completions, code flips and seconds."""

import io
import json
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

from ..packages import install_hint
from ..telemetry.run_files import METRICS_FILE, RUN_FILE, read_rows
from .command_line import configuration_errors


# Metric, title, and scale of the axis; `share` is linear from 0 to 1.
_CURVES = (
    ("reward", "mean reward of a batch", "linear"),
    ("mismatch/abs_logp_mean", "mismatch, nats per token", "log"),
    ("tbpo/dropped/total", "share of completions that TBPO drops", "share"),
    ("quant/code_flip_rate", "share of low-bit codes that change", "log"),
)
_SECONDS = {
    "rollout/seconds": "rollout",
    "rollout/wait_seconds": "wait for a rollout",
    "publish/seconds": "weight sync",
    "step/scoring_seconds": "rewards, log-probs",
    "step/forward_backward_seconds": "forward, backward",
    "step/optimizer_seconds": "optimizer",
}
# Okabe and Ito's colors; with more runs than colors the lines differ.
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#767676")
_LINES = ("-", "--", "-.", ":")
_SETTINGS = ("model", "loss_type", "scheme", "quantize_learner", "seed")
# The page loads nothing, whatever a run's files contain.
_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8" />
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'" />
<meta name="viewport" content="width=device-width, initial-scale=1" />
<title>$title</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2328; background: #fff; max-width: 76rem; margin: 1rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; } svg { display: block; } svg text { font-family: system-ui, sans-serif !important; }
table { border-collapse: collapse; font-size: .875rem; margin: 1rem 0; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid #d0d7de; text-align: left; overflow-wrap: anywhere; }
summary { cursor: pointer; } pre { background: #f6f8fa; padding: .6rem; overflow-x: auto; font-size: .8rem; }
</style></head>
<body>
<h1>$title</h1>
<div class="scroll" role="img" aria-label="reward, mismatch, dropped completions, code flips and seconds">$drawing</div>
<div class="scroll"><table><thead><tr>$head</tr></thead><tbody>
$rows
</tbody></table></div>
$settings
</body>
</html>
""")


@dataclass
class Run:
    """Name of a training run, content of its `run.json`, and values by metric and step, NaN if not finite."""

    name: str
    config: dict[str, Any]
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    last_step: int = 0

    @property
    def progress(self) -> str:
        return f"{self.last_step} of {self.config.get('max_steps', '?')}"

    @property
    def final_reward(self) -> str:
        """Mean of the last quarter of the logged rewards."""
        rewards = [*self.metrics["reward"].values()]
        mean = _mean(rewards[-max(len(rewards) // 4, 1) :])
        return "-" if mean is None else f"{mean:.3g}"


def make_parser(prog: str | None = None) -> ArgumentParser:
    description = "Draw reward, mismatch, dropped completions, code flips and seconds of training runs on one page."
    parser = ArgumentParser(prog=prog, description=description)
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", help="directory of a training run")
    text = "page, or picture such as report.png, to write; default: %(default)s"
    parser.add_argument("--output", metavar="FILE", default="report.html", help=text)
    return parser


def main(args: Namespace) -> None:
    """Read the runs, write the page, and print a line for each run."""
    output = Path(args.output)
    with configuration_errors():
        output.parent.mkdir(parents=True, exist_ok=True)
        runs = write_report(args.run_dirs, output)
    for run in runs:
        print(_printable(f"{run.name}: step {run.progress}, reward {run.final_reward}"))
    print(output.resolve().as_uri())


def write_report(run_dirs: Iterable[str | Path], output: Path) -> list[Run]:
    """Write the page about runs in directories, or their drawings alone in the format of another suffix, such as
    `.png`, and return the runs. `ValueError` is raised for a directory without metrics, for a format that matplotlib
    does not write, and without matplotlib."""
    if find_spec("matplotlib") is None:
        raise ValueError(f"A report needs matplotlib: {install_hint('report')}.")
    runs = [read_run(Path(folder)) for folder in run_dirs]
    figure, file = _draw(runs), io.StringIO()
    if output.suffix.lower() not in ("", ".htm", ".html"):
        figure.savefig(output, dpi=120)
        return runs
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = file.getvalue()
    columns = ("run", *_SETTINGS, "step", "final reward")
    settings = [[run.config.get(name, "-") for name in _SETTINGS] for run in runs]
    cells = [(run.name, *of, run.progress, run.final_reward) for run, of in zip(runs, settings, strict=True)]
    page = _PAGE.substitute(
        title=_escape(runs[0].name if len(runs) == 1 else f"{len(runs)} runs"),
        drawing=svg[svg.index("<svg") :],
        head="".join(f"<th>{name}</th>" for name in columns),
        rows="\n".join(f"<tr>{''.join(f'<td>{_escape(cell)}</td>' for cell in row)}</tr>" for row in cells),
        settings="\n".join(
            f"<details><summary>Settings of {_escape(run.name)}</summary><pre>"
            f"{_escape(json.dumps(run.config, indent=2, ensure_ascii=False))}</pre></details>"
            for run in runs
        ),
    )
    output.write_text(page, encoding="utf-8")
    return runs


def read_run(folder: Path) -> Run:
    """
    Read a run. Lines that are no rows are skipped. A step that goes back is the first one after a resume and voids
    what was logged from there on. `ValueError` is raised for a folder without rows.
    """
    path, config = folder / METRICS_FILE, {}
    if not path.is_file():
        raise ValueError(f"{_printable(str(path))} does not exist; give directories that training runs wrote.")
    if (folder / RUN_FILE).is_file():
        try:
            config = dict(json.loads((folder / RUN_FILE).read_text(encoding="utf-8", errors="replace")))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{_printable(str(folder / RUN_FILE))} is not the record of a run: {error}.") from error
    run = Run(folder.resolve().name, config, {name: {} for name in (*(name for name, *_ in _CURVES), *_SECONDS)})
    for row in read_rows(folder):
        try:
            step = int(row["step"])
        except (ValueError, LookupError, TypeError, OverflowError):
            continue
        if step < run.last_step:
            for values_before in run.metrics.values():
                for later in [known for known in values_before if known >= step]:
                    del values_before[later]
        run.last_step = step
        for name in run.metrics.keys() & row.keys():
            is_finite = isinstance(row[name], float) and math.isfinite(row[name])
            run.metrics[name][step] = row[name] if is_finite else math.nan
    if not run.last_step:
        raise ValueError(f"{_printable(str(path))} has no complete row: no update was logged.")
    return run


def _draw(runs: list[Run]) -> Any:
    """Draw the curves of all runs, and mean seconds as bars."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    style = {"axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.3, "axes.titlesize": 10, "font.size": 9}
    # Text stays text, and the same runs give the same page.
    style |= {"svg.fonttype": "none", "svg.hashsalt": "trl_qarl", "axes.spines.top": False, "axes.spines.right": False}
    looks = [(_COLORS[i % len(_COLORS)], _LINES[i // len(_COLORS) % len(_LINES)]) for i in range(len(runs))]
    with matplotlib.rc_context(style):
        figure = Figure((12, 6.4 + 0.2 * len(runs)), layout="constrained")
        axes = figure.subplots(2, 3).flatten()
        for axis, (metric, title, scale) in zip(axes, _CURVES, strict=False):
            axis.set_title(title)
            axis.set_xlabel("update")
            axis.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
            axis.set_xlim(0, max(run.last_step for run in runs) + 1)
            curves = [run.metrics[metric] for run in runs]
            finite = [value for curve in curves for value in curve.values() if math.isfinite(value)]
            lowest = -math.inf
            if scale == "share":
                axis.set_ylim(0, 1)
            # 0, for which a logarithmic axis has no place, is drawn at its lower end. Whole decades keep noise small.
            elif scale == "log" and (positive := [value for value in finite if value > 0]):
                low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
                lowest = 10.0**low
                axis.set(yscale="log", ylim=(lowest, 10.0 ** max(high, low + 1)))
            for curve, (color, line) in zip(curves, looks, strict=True):
                values = [value if math.isnan(value) else max(value, lowest) for value in curve.values()]
                axis.plot(curve.keys(), values, color=color, ls=line, lw=1.6, marker="o", ms=2)
            if not any(finite):
                _write(axis, "0 at every update" if finite else "not logged")
        _draw_seconds(axes[4], runs, looks)
        axes[5].axis("off")
        if len(runs) > 1:
            # `$` would start a formula.
            names = [_printable(run.name).replace("$", r"\$") for run in runs]
            lines = [Line2D([], [], color=c, ls=ls, label=n) for n, (c, ls) in zip(names, looks, strict=True)]
            axes[5].legend(handles=lines, loc="upper left", frameon=False)
    return figure


def _draw_seconds(axis: Any, runs: list[Run], looks: list[tuple[str, str]]) -> None:
    parts = [name for name in _SECONDS if any(run.metrics[name] for run in runs)]
    height = 0.8 / len(runs)
    for index, (run, (color, _)) in enumerate(zip(runs, looks, strict=True)):
        means = [_mean(run.metrics[name].values()) or 0.0 for name in parts]
        places = [place + (index - (len(runs) - 1) / 2) * height for place in range(len(parts))]
        axis.barh(places, means, height, color=color)
    axis.set_yticks(range(len(parts)), [_SECONDS[name] for name in parts])
    axis.invert_yaxis()
    axis.set_title("seconds, means over the logged rows")
    if not parts:
        _write(axis, "not logged")


def _write(axis: Any, text: str) -> None:
    axis.text(0.5, 0.5, text, ha="center", transform=axis.transAxes)


def _mean(values: Iterable[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def _printable(text: str) -> str:
    """Replace control characters, which would command a terminal and which HTML does not have."""
    return "".join(char if char in "\n\t" or char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _escape(value: Any) -> str:
    return escape(_printable(str(value)))
