"""The outcome of the demo: as JSON, on the terminal, and as one self-contained HTML page."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from decimal import Decimal
from html import escape as html_escape
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from chorister.analyst.estimate import quantile
from chorister.canonical import decimal_text
from chorister.cli.demo_run import DemoOutcome
from chorister.cli.demo_scenarios import Estimate
from chorister.device.audit_pages import as_html, as_text
from chorister.encoding import OOV
from chorister.errors import InvalidInput

_MAX_ROWS: Final = 24
_MAX_ROWS_ON_PAGE: Final = 50
_MAX_STEPS: Final = 12  # labels of an earlier round
_WIDE: Final = 100  # columns of a terminal with room for bars
_BAR_CHARACTERS: Final = 20
_REFUSAL: Final = (
    "A question that devices refuse",
    "An analyst asks about a column that no analysis in the policy may read. The owner of device 0 "
    "finds this in its audit log:",
)


# --- JSON -----------------------------------------------------------------------------------------


def as_json_tree(outcome: DemoOutcome, *, devices: int) -> dict[str, Any]:
    rounds = [
        {
            "round": number,
            "reports": each.result.n_reports,
            "bins": each.result.encoding.size,
            "min_cohort": each.result.min_cohort,
            "local_epsilon": float(each.result.recipe.privacy.local_epsilon),
            "epsilon": float(each.result.epsilon),
            "delta": float(each.result.delta),
            "std_error": round(each.result.noise_sigma, 3),
        }
        for number, each in enumerate(outcome.rounds, start=1)
    ]
    entry = outcome.refused.entry
    return {
        "devices": devices,
        "rounds": rounds,
        "estimates": [
            {k: round(v, 2) if isinstance(v, float) else v for k, v in asdict(row).items()}
            for row in sorted(outcome.estimates, key=lambda row: (-row.round, -row.estimate))
        ],
        "spent": {
            "epsilon": float(max(Decimal(each.epsilon) for each in outcome.spent)),
            "delta": float(max(Decimal(each.delta) for each in outcome.spent)),
            "allowed_epsilon": float(outcome.policy_epsilon),
            "reports": max(each.reports for each in outcome.spent),
            "devices_by_reports": {
                str(reports): count
                for reports, count in sorted(Counter(e.reports for e in outcome.spent).items())
            },
        },
        "refused": [
            {
                "recipe": entry.question.id if entry.question else "",
                "check": entry.check,
                "why": entry.why,
                "query": entry.question.query if entry.question else "",
                "audit": outcome.refused.digest,
            }
        ],
        "seconds": round(outcome.seconds, 1),
    }


# --- The terminal ---------------------------------------------------------------------------------


def print_outcome(outcome: DemoOutcome, console: Console, *, devices: int) -> None:
    """Print what was found, what it cost, who saw what, and what was refused."""
    best, steps = _best(outcome)
    console.print()
    console.print(f"[bold]{outcome.scenario.question}[/] {devices:,} simulated devices\n")
    console.print(_headline(outcome, best), markup=False, style="bold")
    console.print(_table(best, bars=console.width >= _WIDE))
    console.print(_reading(outcome, best), markup=False)
    for text in _on_the_way(outcome, steps):
        console.print(text, markup=False)
    for heading, *texts in _sections(outcome):
        console.print(f"\n[bold]{heading}[/]")
        for text in texts:
            console.print(text, markup=False)
    console.print(f"\n[bold]{_REFUSAL[0]}[/]\n{_REFUSAL[1]}")
    console.print(as_text([outcome.refused]), markup=False)


def _best(outcome: DemoOutcome) -> tuple[list[Estimate], list[Estimate]]:
    """What was found, the largest first and without what may be noise; and steps on the way to it.

    A word of round 1 is not a result if the question is about phrases: it only led to them.
    """
    rows = outcome.estimates
    steps: list[Estimate] = []
    if outcome.scenario.staged and rows:
        last = max(row.round for row in rows)
        rows, steps = [r for r in rows if r.round == last], [r for r in rows if r.round < last]
    z = quantile(0.95, max(len(rows), 1))
    sure = [row for row in rows if row.estimate > z * row.std_error and row.label != OOV]
    return sorted(sure or rows, key=lambda row: -row.estimate), steps


def _headline(outcome: DemoOutcome, best: list[Estimate]) -> str:
    if outcome.scenario.staged and best:
        words = len(best[0].label.split())
        return (
            f"Found {_number(len(best), 'phrase')} of {_number(words, 'word')} that many people "
            "type, from a fleet that never showed anybody what was typed."
        )
    return str(outcome.found.explain())


def _reading(outcome: DemoOutcome, best: list[Estimate]) -> str:
    """How to read the figures."""
    reports = outcome.rounds[best[0].round - 1].result.n_reports if best else 0
    return (
        f"{_covered(outcome.estimates)}. Estimates are how many of the {reports:,} devices that "
        "answered this round hold this; each interval is what the noise allows (95%). The "
        "truth is known because this is a simulation (it is a fraction if a device had several "
        "answers to choose from)."
    )


def _on_the_way(outcome: DemoOutcome, steps: list[Estimate]) -> list[str]:
    """What earlier rounds found, which decided what later ones asked."""
    found = []
    for number in sorted({row.round for row in steps}):
        rows = sorted((r for r in steps if r.round == number), key=lambda row: -row.estimate)
        shown = ", ".join(row.label for row in rows[:_MAX_STEPS])
        more = f" and {len(rows) - _MAX_STEPS:,} more" if len(rows) > _MAX_STEPS else ""
        reports = outcome.rounds[number - 1].result.n_reports
        found.append(
            f"On the way, round {number} asked {reports:,} other devices, and decided what the "
            f"next one asked: {shown}{more}."
        )
    return found


def _table(rows: list[Estimate], *, bars: bool) -> Table:
    """Names and numbers are never cut; bars are drawn where there is room."""
    table = Table()
    for title in ("what", "estimate", "95% interval", "truth"):
        table.add_column(
            title, justify="left" if title == "what" else "right", no_wrap=True, overflow="fold"
        )
    shown = rows[:_MAX_ROWS]
    widest = max((max(row.estimate, row.truth) for row in shown), default=1.0)
    if bars:
        table.add_column("[cyan]█[/] estimate  [bold]│[/] truth", no_wrap=True)
    for row in shown:
        cells = (escape(row.label), *_numbers(row))
        table.add_row(*cells, _bar(row, widest)) if bars else table.add_row(*cells)
    return table


def _numbers(row: Estimate) -> tuple[str, str, str]:
    colour = "green" if row.covered else "red"
    return (
        f"{row.estimate:z,.0f}",
        f"{row.ci_low:z,.0f} – {row.ci_high:z,.0f}",
        f"[{colour}]{row.truth:,.0f}[/]",
    )


def _bar(row: Estimate, widest: float) -> str:
    """A bar for the estimate, with a mark at the truth."""
    scale = _BAR_CHARACTERS / max(widest, 1.0)
    filled = round(max(row.estimate, 0) * scale)
    cells = ["[cyan]█[/]" if i < filled else " " for i in range(_BAR_CHARACTERS + 1)]
    cells[min(round(row.truth * scale), _BAR_CHARACTERS)] = "[bold]│[/]"
    return "".join(cells)


def _covered(rows: list[Estimate]) -> str:
    inside = sum(row.covered for row in rows)
    return f"{inside} of {len(rows)} intervals contain the truth"


def _sections(outcome: DemoOutcome) -> list[tuple[str, ...]]:
    """Headings with their paragraphs, for the terminal and the page."""
    spent = Counter((each.reports, each.epsilon, each.delta) for each in outcome.spent)
    costs = [
        f"{count:,} devices sent {reports} report{'' if reports == 1 else 's'}: epsilon "
        f"{epsilon} of {decimal_text(outcome.policy_epsilon)}, delta {_small(delta)}"
        for (reports, epsilon, delta), count in sorted(spent.items(), reverse=True)
    ]
    rounds = [
        f"Round {number}: {each.result.n_reports:,} reports about {each.result.encoding.size:,} "
        f"bins, local epsilon {decimal_text(each.result.recipe.privacy.local_epsilon)}, epsilon "
        f"{decimal_text(each.result.epsilon)}; nothing is released below "
        f"{each.result.min_cohort:,} reports; an empty bin reads 0 ± {each.result.noise_sigma:.1f}"
        for number, each in enumerate(outcome.rounds, start=1)
    ]
    return [
        ("The rounds", *rounds),
        (
            "What each device spent",
            *costs,
            "So few devices hide each other poorly, so the demo allows a larger epsilon than a "
            "real policy would. With a million devices, the same accuracy costs a fraction of it.",
        ),
        ("What the aggregators saw", *_seen_by_aggregators(outcome)),
        (
            "What they could not see",
            "Any single answer, or even a single noisy bit: each aggregator has one random share "
            "of every report, and together they check, without opening it, that it sets only a few "
            "bits. Each adds its own noise before it releases its sum. Here both run on one "
            "machine, which could combine the shares; in production, two operators run them.",
        ),
    ]


def _number(how_many: int, what: str) -> str:
    return f"{how_many} {what}{'' if how_many == 1 else 's'}"


def _seen_by_aggregators(outcome: DemoOutcome) -> list[str]:
    leader = [status for status in outcome.servers["leader"] if status.uploaded]
    helper = outcome.servers["helper"]
    uploaded = sum(status.uploaded for status in leader)
    rejected = sum(sum(s.rejected(who).values()) for s in leader for who in ("upload", "leader"))
    return [
        f"Leader: {uploaded:,} sealed reports for {_number(len(leader), 'task')}, "
        f"{rejected} rejected, each with the time of its task (not of its upload) and a random id; "
        "it also saw that a device took part, when, and its network address.",
        f"Helper: its shares of {sum(status.verified for status in helper):,} reports, through the "
        "leader; no addresses.",
        "Analyst: one noisy sum per bin and round, after both aggregators added their noise.",
    ]


def _small(number: str) -> str:
    value = Decimal(number)
    return f"{value.normalize():e}" if 0 < value < Decimal("0.001") else decimal_text(value)


# --- The page -------------------------------------------------------------------------------------

_STYLE: Final = """
:root{color-scheme:light dark;--line:#8884;--accent:#3b6fb6}
body{font:1rem/1.55 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem}
h1{line-height:1.2}h2{margin-top:2.2rem;border-bottom:1px solid var(--line)}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{text-align:left;overflow-wrap:break-word}
.missed{color:#c2410c;font-weight:600}
figure{margin:1rem 0;background:#fff;border-radius:.5rem;padding:1rem;overflow-x:auto}
figure svg{max-width:100%;height:auto;overflow:visible}
article{border-top:1px solid var(--line);padding:.5rem 0}
article h2{border:0;margin:.5rem 0;font-size:1.05rem}
dl{display:grid;grid-template-columns:8rem 1fr;gap:.25rem 1rem;margin:0}dt{opacity:.7}
dd{margin:0;overflow-wrap:anywhere;white-space:pre-wrap}.scroll{overflow-x:auto}
"""


def write_report(outcome: DemoOutcome, path: Path, *, devices: int) -> None:
    _write(path, _page(outcome, devices))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"can't write {path}: {error.strerror}") from None


def _page(outcome: DemoOutcome, devices: int) -> str:
    title = html_escape(outcome.scenario.question)
    best, steps = _best(outcome)
    rows = "".join(
        f"<tr><td>{html_escape(row.label)}</td><td>{row.estimate:z,.1f}</td>"
        f"<td>{row.ci_low:z,.1f} – {row.ci_high:z,.1f}</td>"
        f"<td{'' if row.covered else ' class=missed'}>{row.truth:,.1f}</td></tr>"
        for row in best[:_MAX_ROWS_ON_PAGE]
    )
    left_out = len(best) - min(len(best), _MAX_ROWS_ON_PAGE)
    more = f"<p>And {left_out:,} smaller ones; <code>--json</code> prints all of them.</p>"
    way = "".join(f"<p>{html_escape(text)}</p>" for text in _on_the_way(outcome, steps))
    sections = "".join(
        f"<h2>{html_escape(heading)}</h2>"
        + "".join(f"<p>{html_escape(text)}</p>" for text in texts)
        for heading, *texts in _sections(outcome)
    )
    audit = as_html([outcome.refused])
    body = audit[audit.index("<article") : audit.rindex("</article>") + len("</article>")]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{title}</h1><p><strong>{html_escape(_headline(outcome, best))}</strong></p>"
        f"<p>{devices:,} simulated devices, "
        f"{_number(len(outcome.rounds), 'round')}, "
        f"{outcome.seconds:,.0f} seconds. The people are made up; everything else is real: "
        "separate processes for registry, leader and helper, encrypted stores, ledgers, secret "
        "shares and noise.</p>"
        f"<figure>{picture(outcome)}</figure>"
        f"<h2>Estimates and truth</h2><p>{html_escape(_reading(outcome, best))}</p>"
        '<div class="scroll"><table><thead><tr><th>what</th><th>estimate</th><th>interval</th>'
        f"<th>truth</th></tr></thead><tbody>{rows}</tbody></table></div>"
        f"{more if left_out else ''}{way}{sections}"
        f"<h2>{_REFUSAL[0]}</h2><p>{_REFUSAL[1]}</p>{body}</body></html>\n"
    )


def write_picture(outcome: DemoOutcome, path: Path) -> None:
    """Write the chart as SVG, on a white background."""
    svg = picture(outcome).replace("<svg ", '<svg style="background:#fff" ', 1)
    _write(path, svg + "\n")


def picture(outcome: DemoOutcome) -> str:
    """Draw the chart as SVG, without a network."""
    from chorister.console.charts import ChartStyle, draw

    return draw(outcome.found.plot().to_dict(), ChartStyle("light", "wide"))
