"""A report as one HTML page that needs nothing else: tables, and pictures of them as SVG, in light and dark."""

import html
from collections.abc import Iterator, Sequence
from typing import Any

from foretell.bench.record import made_by
from foretell.bench.report import BenchReport, MethodReport, TemperatureReport

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --soft: #6b6b6b; --line: #d8d8d8; --paper: #ffffff; --mark: #1f6f54;
  --second: #b5651d; --third: #4a5fa8; --fourth: #8a3f6e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --soft: #a0a0a0; --line: #3c3c3c; --paper: #161616;
  --mark: #58b894; --second: #dd9a55; --third: #8fa2e6; --fourth: #d389b4; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem;
  margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
p, li { max-width: 44rem; } .soft { color: var(--soft); font-size: .875rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
figure { margin: 1rem 0; } svg { display: block; width: 100%; height: auto; min-width: 30rem; max-width: 44rem; }
svg text { fill: var(--ink); font: 13px system-ui, sans-serif; } svg .soft { fill: var(--soft); }
code { overflow-wrap: anywhere; }
"""
COLOURS = ("var(--mark)", "var(--second)", "var(--third)", "var(--fourth)")
WIDTH, LEFT, RIGHT = 700, 190, 60


def page(report: BenchReport, conclusions: Sequence[str]) -> str:
    """The page. conclusions: a sentence for each temperature."""
    settings = report.settings
    title = f"{settings.get('target', 'a target')}: speculative decoding measured"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_safe(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{_safe(title)}</h1>",
        *(["<p><strong>Partial: the run was interrupted.</strong></p>"] if report.partial else []),
        *(f"<p><strong>{_safe(text)}</strong></p>" for text in conclusions),
        *(part for at in report.temperatures for part in _temperature(at)),
        *_about(report),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _safe(text: Any) -> str:
    return html.escape(str(text))


def _temperature(at: TemperatureReport) -> Iterator[str]:
    guessing = [method for method in at.methods if method.config["method"] != "none"]
    yield f"<h2>Temperature {at.temperature:g}</h2>"
    yield _table(at.methods)
    if not guessing:
        return
    lines = [f"{method.label}: {method.headroom.line}" for method in guessing if method.headroom is not None]
    if lines:
        yield "<ul>" + "".join(f"<li>{_safe(line)}</li>" for line in lines) + "</ul>"
        yield '<p class="soft">Possible: the speedup if every guess of the method\'s shape were right, at these costs.</p>'
    yield _figure(
        "Speed against plain decoding of the same prompts, with 95 % intervals. Left of the line, guessing costs time.",
        _intervals(guessing),
    )
    if any(method.overall.conditional_acceptance_per_pos for method in guessing):
        yield _figure(
            "Share of guesses accepted at each place of a proposal, given that those before were accepted.",
            _positions(guessing),
        )
    if any(method.overall.verify_cost is not None for method in guessing):
        yield _figure(
            "What a step costs, in plain passes of the target: guessing, the pass that checks, and the rest. A step pays "
            "where it writes more tokens than that.",
            _costs(guessing),
        )


def _table(methods: Sequence[MethodReport]) -> str:
    head = ("method", "speedup", "95 %", "tokens/s", "tokens a step", "accepted", "same text", "prompts")
    rows = []
    for method in methods:
        whole, plain = method.overall, method.config["method"] == "none"
        value = whole.speedup
        cells = [
            method.label + ("" if method.exact else " (lossy)"),
            "1" if plain else f"{value.value:.2f}",
            "" if plain or value.is_point else f"{value.low:.2f} to {value.high:.2f}",
            f"{whole.tokens_per_second:.1f}",
            f"{whole.mean_acceptance_length:.2f}",
            "" if plain else f"{whole.acceptance_rate:.0%}",
            "" if plain else f"{whole.num_identical}/{whole.num_prompts}",
            str(whole.num_prompts),
        ]
        rows.append("<tr>" + "".join(f"<td>{_safe(cell)}</td>" for cell in cells) + "</tr>")
    header = "".join(f"<th>{_safe(name)}</th>" for name in head)
    return f'<div class="scroll"><table><thead><tr>{header}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _figure(caption: str, drawing: str) -> str:
    return f'<figure><div class="scroll">{drawing}</div><figcaption class="soft">{_safe(caption)}</figcaption></figure>'


def _svg(height: float, label: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{_safe(label)}">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", soft: bool = False) -> str:
    kind = ' class="soft"' if soft else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{_safe(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = "var(--line)", width: float = 1.0) -> str:
    where = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {where} stroke="{colour}" stroke-width="{width}"/>'


def _short(label: str, most: int = 26) -> str:
    return label if len(label) <= most else label[: most - 1] + "…"


def _intervals(methods: Sequence[MethodReport]) -> str:
    """A point and its interval for each method, and a line at plain decoding."""
    top = max(1.2, *(method.overall.speedup.high for method in methods)) * 1.05

    def at(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * max(0.0, min(value, top)) / top

    height = 34 * len(methods) + 34
    parts = [
        _line(at(1.0), 8, at(1.0), height - 26, "var(--soft)"),
        _text(at(1.0), height - 8, "plain = 1", anchor="middle", soft=True),
    ]
    for row, method in enumerate(methods):
        y, value = 24 + 34 * row, method.overall.speedup
        parts += [
            _text(LEFT - 12, y + 4, _short(method.label), anchor="end"),
            _line(at(value.low), y, at(value.high), y, "var(--mark)", 3),
            f'<circle cx="{at(value.value):.1f}" cy="{y}" r="5" fill="var(--mark)"/>',
            _text(at(value.high) + 10, y + 4, f"{value.value:.2f}"),
        ]
    return _svg(height, "speedup of each method with its interval", parts)


def _positions(methods: Sequence[MethodReport]) -> str:
    """Acceptance by position, a line a method."""
    known = [method for method in methods if method.overall.conditional_acceptance_per_pos]
    longest = max(len(method.overall.conditional_acceptance_per_pos) for method in known)
    bottom, left = 220.0, 40.0

    def x(place: int) -> float:
        return left + (WIDTH - left - RIGHT - 130) * (place / max(1, longest - 1))

    def y(rate: float) -> float:
        return bottom - 190 * rate

    parts = [
        part
        for rate in (0.0, 0.5, 1.0)
        for part in (_line(left, y(rate), x(longest - 1), y(rate)), _text(0, y(rate) + 4, f"{rate:.0%}", soft=True))
    ]
    parts += [_text(x(place), bottom + 20, str(place + 1), anchor="middle", soft=True) for place in range(longest)]
    for row, method in enumerate(known):
        colour = COLOURS[row % len(COLOURS)]
        rates = method.overall.conditional_acceptance_per_pos
        points = " ".join(f"{x(place):.1f},{y(rate):.1f}" for place, rate in enumerate(rates))
        dash = ' stroke-dasharray="6 4"' if row >= len(COLOURS) else ""
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts += [
            f'<circle cx="{x(place):.1f}" cy="{y(rate):.1f}" r="3" fill="{colour}"/>'
            for place, rate in enumerate(rates)
        ]
        where = WIDTH - RIGHT - 110
        parts += [
            _line(where, 30 + 20 * row, where + 16, 30 + 20 * row, colour, 3),
            _text(where + 22, 34 + 20 * row, _short(method.label, 18)),
        ]
    return _svg(max(250.0, 50.0 + 20 * len(known)), "acceptance by position", parts)


def _costs(methods: Sequence[MethodReport]) -> str:
    """The parts of a step as a bar, and its tokens as a mark."""
    rows = []
    for method in methods:
        whole = method.overall
        if whole.verify_cost is None or whole.draft_cost is None:
            continue
        guesses = (whole.mean_acceptance_length - 1.0) / whole.acceptance_rate if whole.acceptance_rate else 0.0
        rows.append((method.label, (guesses * whole.draft_cost, whole.verify_cost, whole.overhead_cost or 0.0), whole))
    top = max(max(sum(parts), whole.mean_acceptance_length) for _, parts, whole in rows) * 1.05
    scale = (WIDTH - LEFT - RIGHT) / top
    height = 34 * len(rows) + 44
    drawn: list[str] = []
    for row, (label, costs, whole) in enumerate(rows):
        y, x = 14 + 34 * row, float(LEFT)
        drawn.append(_text(LEFT - 12, y + 14, _short(label), anchor="end"))
        for cost, colour in zip(costs, COLOURS, strict=False):
            drawn.append(f'<rect x="{x:.1f}" y="{y}" width="{cost * scale:.1f}" height="18" fill="{colour}"/>')
            x += cost * scale
        tokens = LEFT + whole.mean_acceptance_length * scale
        drawn += [
            _line(tokens, y - 4, tokens, y + 22, "var(--ink)", 2),
            _text(max(tokens, x) + 6, y + 14, f"{whole.mean_acceptance_length:.2f}"),  # never on the bar
        ]
    x = float(LEFT)
    for name, colour in (
        *zip(("guessing", "checking", "rest"), COLOURS, strict=False),
        ("tokens a step", "var(--ink)"),
    ):
        drawn += [
            f'<rect x="{x:.1f}" y="{height - 18}" width="10" height="10" fill="{colour}"/>',
            _text(x + 15, height - 9, name, soft=True),
        ]
        x += 110
    return _svg(height, "the cost of a step by parts", drawn)


def _about(report: BenchReport) -> Iterator[str]:
    """How it was made, so that it can be made again."""
    yield "<h2>How this was measured</h2><ul>"
    shown = ("target", "implementation", "dtype", "weights", "max_new_tokens", "rounds", "seed", "num_prompts")
    for name in shown:
        if name in report.settings:
            yield f"<li>{_safe(name.replace('_', ' '))}: {_safe(report.settings[name])}</li>"
    machine = report.provenance.get("machine", {})
    yield f"<li>{_safe(machine.get('processor'))}, {_safe(machine.get('torch_threads'))} threads</li>"
    versions = report.provenance.get("versions", {})
    yield f"<li>{_safe(', '.join(f'{name} {found}' for name, found in versions.items() if found))}</li>"
    command = made_by(report)
    if command:
        yield f"<li>command: <code>{_safe(' '.join(command))}</code></li>"
    yield f"<li>time: {_safe(report.provenance.get('time'))}</li></ul>"
    yield (
        '<p class="soft">Every prompt was decoded plainly and by each method in turn, in one process on one set of '
        "weights. Texts are cut where they begin to loop. Intervals draw whole questions anew (bootstrap): they show other "
        "prompts of the same kind, not another machine.</p>"
    )
