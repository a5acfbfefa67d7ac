"""A report as one self-contained page: the verdict first, then what failed, then the rest."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hardpoint_conformance.levels import Level
from hardpoint_conformance.outcomes import Outcome, Verdict
from hardpoint_conformance.report import verdict_of
from hardpoint_conformance.verdict import Standing, standings

_SLOWEST = 10
_OUTCOME_CLASS = {
    Outcome.PASSED: "good",
    Outcome.FAILED: "bad",
    Outcome.ERROR: "bad",
    Outcome.CRASHED: "bad",
    Outcome.HUNG: "bad",
    Outcome.NOT_RUN: "bad",
    Outcome.WAIVED: "warn",
    Outcome.NOT_TESTABLE: "warn",
    Outcome.NOT_CLAIMED: "idle",
    Outcome.CLAIMED: "idle",
}
_GROUPS = {
    "passed": ("good", frozenset({Outcome.PASSED})),
    "failed": ("bad", frozenset({Outcome.FAILED, Outcome.ERROR, Outcome.CRASHED, Outcome.HUNG, Outcome.NOT_RUN})),
    "waived or not testable": ("warn", frozenset({Outcome.WAIVED, Outcome.NOT_TESTABLE})),
    "not called for by the claims": ("idle", frozenset({Outcome.NOT_CLAIMED, Outcome.CLAIMED})),
}
_VERDICT_CLASS = {
    Verdict.CONFORMANT: "good",
    Verdict.SIMULATED: "note",
    Verdict.WITH_WAIVERS: "warn",
    Verdict.NOT_CONFORMANT: "bad",
    Verdict.PARTIAL: "note",
}
_STANDING_CLASS = {
    Standing.PROVED: "good",
    Standing.REFUSED: "note",
    Standing.WAIVED: "warn",
    Standing.FAILED: "bad",
    Standing.UNPROVED: "bad",
    Standing.NOT_REFUSED: "bad",
    Standing.NOT_TESTABLE: "warn",
    Standing.NOT_CLAIMED: "idle",
    Standing.OUT_OF_SCOPE: "idle",
}
Report = Mapping[str, Any]


def to_html(report: Report) -> str:
    """Return the page."""
    sections = (_failures, _waived, _levels, _capabilities, _quality, _untestable, _slowest, _everything, _environment)
    body = "\n".join(filter(None, (section(report) for section in sections)))
    return page(f"{report['backend']['name']}: Hardpoint conformance", _head(report) + body)


def page(title: str, body: str) -> str:
    """Return a self-contained page with the suite's style around a body."""
    style = Path(__file__).with_name("page.css").read_text("utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _section(title: str, *parts: str, note: str = "") -> str:
    lead = f'<p class="soft">{note}</p>' if note else ""
    return f"<section>\n<h2>{escape(title)}</h2>\n{lead}\n" + "\n".join(parts) + "\n</section>"


def _badge(text: str, kind: str) -> str:
    return f'<span class="badge {kind}">{escape(text)}</span>'


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _what(report: Report) -> str:
    """Return which tests were asked for."""
    selection = report["selection"]
    if selection["clauses"]:
        return "chosen clauses: " + ", ".join(selection["clauses"])
    levels = ", ".join(f"L{level}" for level in selection["levels"])
    return f"profile {selection['profile']} ({levels})" if selection["profile"] else f"levels {levels}"


def _head(report: Report) -> str:
    backend, device, verdict = report["backend"], report["device"], verdict_of(report)
    simulated = " " + _badge("simulated driver", "note") if report["simulated"] else ""
    source = " ".join(filter(None, (backend["distribution"], backend["version"])))
    where = f"on {escape(device['name'])}" if device else "no device"
    driver = f", driver {escape(device['driver_version'])}" if device and device["driver_version"] else ""
    title = (
        f'<p class="soft small">Hardpoint conformance report</p><h1>{escape(backend["name"])} {where}{simulated}</h1>'
    )
    lead = (
        f'<p class="soft">{escape(backend["vendor"] or "unknown vendor")} · {escape(source or "unknown distribution")}{driver} · '
        f"{escape(_what(report))} · seed {report['selection']['seed']} · suite {escape(report['suite']['version'])}</p>"
    )
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in report["verdict"]["reasons"])
    told = {
        Verdict.CONFORMANT: "Everything that was asked for passed: every claim is proved, and what is not claimed is refused cleanly.",
        Verdict.SIMULATED: "Everything that a simulated driver can show passed.",
        Verdict.WITH_WAIVERS: "Known failures are accepted for now, each with a reason below; everything else passed.",
        Verdict.NOT_CONFORMANT: "The backend does not do what the specification asks:",
        Verdict.PARTIAL: "Only chosen clauses were run: this says nothing of the backend's conformance.",
    }[verdict]
    note = (
        "<p>The vendor's driver was a simulation over host memory: this proves the backend's own code, not the device.</p>"
        if report["simulated"]
        else ""
    )
    notes = "".join(f'<p class="small">{escape(text.capitalize())}</p>' for text in report["verdict"]["notes"])
    unavailable = (
        f"<p>The backend cannot compute here: {escape(report['unavailable'])}</p>" if report["unavailable"] else ""
    )
    box = (
        f'<div class="verdict {_VERDICT_CLASS[verdict]}"><strong>{escape(verdict.value.capitalize())}</strong><p>{told}</p>'
        f"{f'<ul>{reasons}</ul>' if reasons else ''}{note}{unavailable}{notes}</div>"
    )
    return f"<header>\n{title}\n{lead}\n{box}\n{_facts(report)}\n</header>\n"


def _facts(report: Report) -> str:
    counts = Counter(Outcome(result["outcome"]) for result in report["results"])
    passed, failed, limited, idle = (sum(counts[outcome] for outcome in group) for _, group in _GROUPS.values())
    facts = [
        (f"{passed}", "tests passed"),
        (f"{failed}", "failed, crashed or hung"),
        (f"{limited}", "waived or not testable"),
        (f"{idle}", "not called for by the claims"),
        (_duration(report["seconds"]), f"on {report['environment']['cpu_count']} processors"),
    ]
    return (
        '<div class="facts">'
        + "".join(f'<div class="fact"><b>{escape(value)}</b><span>{escape(text)}</span></div>' for value, text in facts)
        + "</div>"
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 90 else f"{int(seconds) // 60} min {int(seconds) % 60:02} s"


def _failures(report: Report) -> str:
    failed = [r for r in report["results"] if Outcome(r["outcome"]) in _GROUPS["failed"][1]]
    if not failed:
        return ""
    by_clause: dict[str, list[Mapping[str, Any]]] = {}
    for result in failed:
        by_clause.setdefault(result["clause"], []).append(result)
    cards = [_card(*found, report=report) for found in by_clause.values()]
    clauses = "clause" if len(by_clause) == 1 else "clauses"
    return _section(f"Failing tests ({len(failed)}, of {len(by_clause)} {clauses})", *cards)


def _card(*results: Mapping[str, Any], report: Report, kind: str = "") -> str:
    """Return results of one clause: the first in full, the others folded."""
    rule = escape(report["rules"].get(results[0]["clause"], ""))
    first, *others = (_case(result) for result in results)
    more = f"{len(others)} more {'case' if len(others) == 1 else 'cases'} of this clause"
    folded = f"<details><summary>{more}</summary>{'<hr>'.join(others)}</details>" if others else ""
    return f'<div class="card {kind}"><p>{rule}</p>{first}{folded}</div>'


def _case(result: Mapping[str, Any]) -> str:
    outcome, ratio = Outcome(result["outcome"]), result["error_ratio"]
    measured = f' <span class="soft small">error {ratio:.3g} times the bound</span>' if ratio is not None else ""
    return (
        f"<p>{_badge(outcome.value.replace('_', ' '), _OUTCOME_CLASS[outcome])} <b>{_code(result['id'])}</b>{measured}</p>"
        f'<pre>{escape(result["message"].strip()) or "no message"}</pre><p class="soft small">Run it again:</p>'
        f"<pre>{escape(result['reproduction'])}</pre>"
    )


def _waived(report: Report) -> str:
    if not report["waivers"]:
        return ""
    rows = []
    for waiver in report["waivers"]:
        found = [r for r in report["results"] if r.get("waiver") == waiver["id"]]
        rows.append((_code(waiver["id"]), escape(waiver["reason"]), escape(waiver["until"]), str(len(found))))
    cards = [
        _card(*found, report=report, kind="warned")
        for waiver in report["waivers"]
        if (found := [r for r in report["results"] if r.get("waiver") == waiver["id"]])
    ]
    table = _table(("waived", "reason", "until version", "failures"), rows, numbers=(3,))
    return _section("Waivers", table, *cards, note="Failures that are known and accepted for a while; none is hidden.")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    kinds = [' class="number"' if index in numbers else "" for index in range(len(head))]
    top = "".join(f"<th{kind}>{escape(text)}</th>" for kind, text in zip(kinds, head, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>\n"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _levels(report: Report) -> str:
    rows = []
    for number in report["selection"]["levels"]:
        level = Level(number)
        counts = Counter(Outcome(r["outcome"]) for r in report["results"] if r["level"] == number)
        if not counts and report["selection"]["clauses"]:
            continue
        total = counts.total()
        groups = [(name, kind, sum(counts[outcome] for outcome in group)) for name, (kind, group) in _GROUPS.items()]
        bars = "".join(
            f'<i class="{kind}" style="width:{100 * count / total:.2f}%" title="{count} {name}"></i>'
            for name, kind, count in groups
            if count
        )
        text = ", ".join(f"{count} {_SHORT[name]}" for name, _, count in groups if count) or "no tests"
        rows.append(
            f'<div class="level"><div><b>{level}</b> {escape(level.title)}</div><div class="bar">{bars}</div>'
            f'<div class="soft small">{text}</div></div>'
        )
    legend = "".join(
        f'<span><i class="{kind}" style="background:var(--{kind})"></i>{escape(name)}</span>'
        for name, (kind, _) in _GROUPS.items()
    )
    return _section("Levels", *rows, f'<div class="legend">{legend}</div>')


_SHORT = {
    "passed": "passed",
    "failed": "failed",
    "waived or not testable": "limited",
    "not called for by the claims": "not called for",
}


def _capabilities(report: Report) -> str:
    if report["claims"] is None or report["selection"]["clauses"]:
        return ""
    found = standings(report)
    cells = []
    for name, standing in found.items():
        if standing is Standing.OUT_OF_SCOPE:
            continue
        outcomes = Counter(Outcome(r["outcome"]) for r in report["results"] if name in r["capabilities"])
        run = sum(count for outcome, count in outcomes.items() if outcome.applies) - outcomes[Outcome.NOT_TESTABLE]
        count = f' <span class="soft small">{outcomes[Outcome.PASSED]}/{run}</span>' if run else ""
        badge = _badge(standing.value, _STANDING_CLASS[standing])
        cells.append(f'<div class="claim"><span>{_code(name)}{count}</span>{badge}</div>')
    values = _claimed_values(report["claims"])
    hidden = len(found) - len(cells)
    note = (
        "Proved: claimed, and all its tests passed (passed/run). Refused: not claimed, and refused with reasons before any work. "
        f"Not claimed: nothing to refuse.{f' {hidden} further capabilities are not in these levels.' if hidden else ''}"
    )
    return _section("Capabilities", f'<div class="claims">{"".join(cells)}</div>', values, note=note)


def _claimed_values(claims: Mapping[str, Any]) -> str:
    from hardpoint_conformance.claims import from_json

    found = from_json(claims)
    attention = found.attention
    if not attention.dtypes:
        return ""
    facts = {
        "head dimensions": str(attention.head_dims),
        "block sizes": f"{attention.block_sizes} (default {attention.default_block_size})",
        "query heads per KV head": str(attention.group_sizes),
        "longest context": f"{attention.max_context:,} tokens",
        "tensor parallel": str(found.tensor_parallel),
    }
    return _definitions(facts)


def _definitions(facts: Mapping[str, str]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items()) + "</dl>"


def _quality(report: Report) -> str:
    ratios: dict[str, list[tuple[float, str]]] = {}
    for result in report["results"]:
        if result["error_ratio"] is not None:
            ratios.setdefault(result["clause"], []).append((max(result["error_ratio"], 0.0), result["id"]))
    if not ratios:
        return ""
    everything = [ratio for found in ratios.values() for ratio, _ in found]
    positive = [ratio for ratio in everything if ratio > 0]
    low = max(min(-1, math.floor(math.log10(min(positive, default=0.1)))), -3)
    high = max(math.log10(2.0), math.log10(max(everything)) if max(everything) > 0 else 0.0)

    def place(ratio: float) -> float:
        power = max(low, min(high, math.log10(ratio) if ratio > 0 else low))
        return 100 * (power - low) / (high - low)

    rows = [_strip(clause, found, place) for clause, found in sorted(ratios.items(), key=lambda item: -max(item[1])[0])]
    ticks = [10.0**power for power in range(low, int(high) + 1)]
    labels = "".join(
        f'<text x="{place(tick):.2f}%" y="14" text-anchor="{"start" if tick == ticks[0] else "middle"}"'
        f"{' class=edge' if tick == 1 else ''}>{'bound' if tick == 1 else f'{tick:g}'}</text>"
        for tick in ticks
    )
    axis = f'<div class="row"><span></span><svg role="img" aria-label="scale">{labels}</svg><span></span></div>'
    note = (
        f"Each dot is one case: its worst error against a 64-bit oracle, as a share of the bound that a plain low-precision "
        f"implementation gives ({len(everything)} cases, logarithmic). Left is better; beyond the bound is a failure."
    )
    return _section("Numeric quality", f'<div class="quality">{axis}{"".join(rows)}</div>', note=note)


def _strip(clause: str, found: Sequence[tuple[float, str]], place: Any) -> str:
    dots = "".join(
        f'<circle class="dot{" over" if ratio > 1 else ""}" cx="{place(ratio):.2f}%" cy="10" r="4">'
        f"<title>{escape(name)}: {ratio:.3g}</title></circle>"
        for ratio, name in sorted(found)
    )
    bound = place(1.0)
    worst = max(found)[0]
    return (
        f'<div class="row">{_code(clause)}<svg role="img" aria-label="{escape(clause)}: worst {worst:.3g}">'
        f'<line class="track" x1="0" x2="100%" y1="10" y2="10"/>'
        f'<line class="bound" x1="{bound:.2f}%" x2="{bound:.2f}%" y1="0" y2="20"/>{dots}</svg>'
        f'<span class="number">{worst:.2f}</span></div>'
    )


def _untestable(report: Report) -> str:
    by_reason: dict[str, list[str]] = {}
    for result in report["results"]:
        if result["outcome"] == Outcome.NOT_TESTABLE:
            by_reason.setdefault(result["message"], []).append(result["id"])
    parts = [
        f"<details><summary>{escape(reason)} ({len(ids)})</summary><p>{'<br>'.join(map(_code, ids))}</p></details>"
        for reason, ids in by_reason.items()
    ]
    note = "These cases apply, and could not be run here. A clause of which no case can be run is not proved."
    return _section(f"Not testable ({sum(map(len, by_reason.values()))})", *parts, note=note) if parts else ""


def _slowest(report: Report) -> str:
    slowest = sorted(report["results"], key=lambda result: -result["seconds"])[:_SLOWEST]
    rows = [(_code(r["id"]), f"L{r['level']}", f"{r['seconds']:.2f} s") for r in slowest if r["seconds"] >= 0.01]
    return _section("Slowest tests", _table(("test", "level", "time"), rows, numbers=(1, 2))) if rows else ""


def _everything(report: Report) -> str:
    parts = []
    for number in report["selection"]["levels"]:
        results = [result for result in report["results"] if result["level"] == number]
        if results:
            title = f"{Level(number)} {Level(number).title}: {len(results)} tests"
            parts.append(f"<details><summary>{escape(title)}</summary>{''.join(_clauses(results, report))}</details>")
    return _section("All results", *parts, note="By level and clause.")


def _clauses(results: Sequence[Mapping[str, Any]], report: Report) -> Iterator[str]:
    for clause in dict.fromkeys(result["clause"] for result in results):
        rule = escape(report["rules"].get(clause, ""))
        yield f'<p style="margin-top:16px"><b>{_code(clause)}</b><br><span class="soft">{rule}</span></p>'
        yield _table(
            ("case", "result", "error", "time"),
            (
                (
                    _code(result["id"][len(clause) :].strip("[]") or "the only one"),
                    _badge(result["outcome"].replace("_", " "), _OUTCOME_CLASS[Outcome(result["outcome"])]),
                    "" if result["error_ratio"] is None else f"{result['error_ratio']:.2g}",
                    f"{result['seconds']:.2f} s",
                )
                for result in results
                if result["clause"] == clause
            ),
            numbers=(2, 3),
        )


def _environment(report: Report) -> str:
    environment, backend = report["environment"], report["backend"]
    facts = {
        "tested": report["started"],
        "Python": environment["python"],
        "platform": environment["platform"],
        "processor": f"{environment['cpu']} ({environment['cpu_count']} processors)",
        "packages": ", ".join(f"{name} {version}" for name, version in environment["packages"].items()),
        "backend": f"{backend['distribution']} {backend['version']}, entry point {backend['entry_point']}, contract {backend['api']}",
        "core": f"hardpoint {report['suite']['core']}, contract {report['suite']['contract']}",
    }
    for name, state in (report["git"] or {}).items():
        facts[f"{name} commit"] = state["commit"] + (" with changes" if state["dirty"] else "")
    facts |= {"test list": f"sha256 {report['suite']['list_sha256']}", "report": f"sha256 {report['digest']}"}
    note = f"<p>Check the report without hardware: {_code('hardpoint conformance verify report.json')}</p>"
    return _section("Environment", _definitions(facts), note)
