"""The top of the page: is the run healthy, and is one setting better than another?"""

from html import escape
from typing import Any

from ..telemetry.advisor import LEVELS, Finding, assess
from .figures import draw_result
from .html import bullets, details, prose, swatch, table
from .sentences import RULE, describe_differences, format_number
from .statistics import Group


__all__ = ["MAIN_CARDS", "assess_group", "make_verdict", "summarize_findings"]

MAIN_CARDS = ("Learning", "Aligned", "Updating")
_WORDS = {"fine": "fine", "watch": "look at it", "bad": "not healthy"}


def assess_group(group: Group) -> list[tuple[Finding, str]]:
    """Return what the rules say of the runs of a group: of each rule the worst finding, and the run that it is about."""
    worst: dict[str, tuple[Finding, str]] = {}
    for run in group.runs:
        rows = [{"step": step, **row} for step, row in run.rows.items()]
        for finding in assess(rows, group.config):
            known = worst.get(finding.rule)
            if known is None or LEVELS.index(finding.level) > LEVELS.index(known[0].level):
                worst[finding.rule] = (finding, run.name)
    return list(worst.values())


def summarize_findings(findings: list[tuple[Finding, str]]) -> str:
    """Return one line for the console: the main numbers, and what is not fine."""
    main = [finding.value for finding, _ in findings if finding.card in MAIN_CARDS]
    troubled = list(dict.fromkeys(f"{f.card} ({_WORDS[f.level]})" for f, _ in findings if f.level != "fine"))
    return "; ".join(main) + (f". Not fine: {', '.join(troubled)}" if troubled else ". All fine" if main else "")


def make_verdict(groups: list[Group], summaries: list[dict[str, Any]]) -> list[str]:
    """Make cards of a single group, or a table of all, the final rewards, and the differences between groups."""
    found = [assess_group(group) for group in groups]
    if len(groups) == 1:
        return [*_cards(found[0], len(groups[0].runs)), *_differences_of_scores(groups)]
    parts = [f'<p class="verdict">{escape(_sentence(groups))}</p>']
    if any(summary["mean"] is not None for summary in summaries):
        svg = draw_result(groups, summaries, "final reward")
        caption = "Final reward: a dot for the mean, a ring for each seed, a line from the smallest to the largest."
        parts.append(f'<figure class="result">{svg}<figcaption>{caption}</figcaption></figure>')
    parts += ["<h3>Health of each group</h3>", _matrix(groups, found)]
    advice = [
        f"{group.label}: {finding}"
        for group, of in zip(groups, found, strict=True)
        for finding, _ in of
        if finding.advice
    ]
    if advice:
        parts.append(details("What to do next", bullets(advice)))
    parts += _differences(groups, None)
    return parts + _differences_of_scores(groups)


def _sentence(groups: list[Group]) -> str:
    found = describe_differences(groups)
    if found["exceeds"]:
        number = len(found["exceeds"])
        return f"{found['exceeds'][0]}" + (
            f" {number - 1} more {'do' if number > 2 else 'does'} as well." if number > 1 else ""
        )
    if found["within"]:
        return "No difference of final reward exceeds the seed noise."
    if found["unknown"]:
        return "No difference of final reward can be judged: that takes two seeds with a final reward in either group."
    return "There are no two groups of the same model and reward to compare."


def _cards(findings: list[tuple[Finding, str]], num_runs: int) -> list[str]:
    if not findings:
        return ["<p>The run has logged nothing yet that a rule could judge.</p>"]
    by_card: dict[str, list[tuple[Finding, str]]] = {}
    for finding, run in findings:
        by_card.setdefault(finding.card, []).append((finding, run))
    others = [card for card in by_card if card not in MAIN_CARDS]
    parts = []
    for cards, kind in ((MAIN_CARDS, ""), (others, " minor")):
        made = [_card(card, by_card[card], kind, num_runs) for card in cards if card in by_card]
        if made:
            parts.append(f'<div class="cards">{"".join(made)}</div>')
    return parts


def _card(card: str, findings: list[tuple[Finding, str]], kind: str, num_runs: int) -> str:
    level = _worst(findings)
    lines = [f'<div class="card {level}{kind}"><h3>{escape(card)}<span class="level">{_WORDS[level]}</span></h3>']
    for finding, run in findings:
        which = f" (worst of {num_runs} runs: {run})" if num_runs > 1 else ""
        lines.append(
            f'<p class="number">{escape(finding.value)}</p><small>{escape(finding.threshold + which)}</small>'
        )
        if finding.advice:
            lines.append(f"<p>{prose(finding.advice)}</p>")
    return "".join([*lines, "</div>"])


def _matrix(groups: list[Group], found: list[list[tuple[Finding, str]]]) -> str:
    names = list(dict.fromkeys(finding.card for findings in found for finding, _ in findings))
    cards = [*(card for card in MAIN_CARDS if card in names), *(card for card in names if card not in MAIN_CARDS)]
    rows, levels = [], []
    for group, findings in zip(groups, found, strict=True):
        of_cards = [[pair for pair in findings if pair[0].card == card] for card in cards]
        rows.append([group.label, *(", ".join(f.value for f, _ in pairs) or "-" for pairs in of_cards)])
        levels.append(["", *(_worst(pairs) for pairs in of_cards)])
    return table(["group", *cards], rows, levels)


def _worst(findings: list[tuple[Finding, str]]) -> str:
    return max((finding.level for finding, _ in findings), key=LEVELS.index, default="")


def _differences_of_scores(groups: list[Group]) -> list[str]:
    runs = [run for group in groups for run in group.runs]
    parts = []
    for score in ("greedy", "sampled"):
        if len(groups) > 1 and any(score in run.evaluation for run in runs):
            parts += _differences(groups, score)
    return parts


def _differences(groups: list[Group], score: str | None) -> list[str]:
    found = describe_differences(groups, score)
    if not any(found.values()):
        return []
    parts = [f"<h3>Differences of {'final reward' if score is None else f'the {score} evaluation'}</h3>"]
    for verdict, heading in (
        ("exceeds", "Differences that exceed the seed noise"),
        ("within", "Differences that do not exceed the seed noise"),
        ("unknown", "Differences whose seed noise cannot be judged"),
    ):
        if found[verdict]:
            first, rest = found[verdict][:10], found[verdict][10:]
            content = bullets(first) + (details(f"{len(rest)} more", bullets(rest)) if rest else "")
            title = f"{heading}: {len(found[verdict])}"
            parts.append(f"<p>{title}</p>{content}" if verdict == "exceeds" else details(title, content))
    rule = RULE if score is None else "The same rule, on the share of problems solved after training."
    return [*parts, details("How differences are judged", f"<p>{escape(rule)}</p>")]


def legend(groups: list[Group]) -> str:
    """Return names and lines of the groups, where there are several."""
    if len(groups) == 1:
        return ""
    items = "".join(f"<li>{swatch(group.color, group.line)}{escape(group.title)}</li>" for group in groups)
    return f'<ul class="legend">{items}</ul>'


def final_words(summary: dict[str, Any]) -> str:
    """Return the final reward of a group with its range over seeds."""
    if summary["mean"] is None:
        return "-"
    if summary["sd"] is None:
        return format_number(summary["mean"])
    return f"{format_number(summary['mean'])} ({format_number(summary['min'])} to {format_number(summary['max'])})"
