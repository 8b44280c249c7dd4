"""The bench report for people."""

from typing import TYPE_CHECKING, Any

from foretell.cli.layout import console_of, new_table, print_line, print_table

if TYPE_CHECKING:
    from rich.console import Console

    from foretell.bench import BenchReport, Figures, MethodReport, TemperatureReport

WIDE = 136
COLUMNS = (
    "method", "prompts", "tok/s", "speedup", "length", "rate", "c", "v", "model", "of limit", "outside", "looped", "same",
)  # fmt: skip
NOT_IF_NARROW = {"prompts", "rate", "model", "of limit", "outside", "looped"}
NOTES = {
    "tok/s": "decoded tokens a second, prompts not counted.",
    "speedup": "tokens/s against plain decoding of the same prompts, in brackets 95 % by paired bootstrap over prompts.",
    "length": "mean acceptance length, 1 + accepted / steps.",
    "rate": "accepted / guessed tokens.",
    "c": "one guess, in plain passes.",
    "v": "one verifying pass, in plain passes.",
    "model": "the speedup that length / (v + guesses * c) predicts.",
    "outside": "time outside model passes.",
    "looped": "prompts cut at their first loop (a 16-gram seen three times), on both sides.",
    "same": "prompts whose tokens are all identical with plain decoding's.",
    "of limit": "weight bytes / time of a pass / memory read measured here; above 100 % the weights stay in the cache.",
}
"""What a column says: printed below the table, of the columns that are shown."""


def show(report: "BenchReport", *, no_color: bool) -> None:
    """One table per temperature, then the acceptance by position, and the settings and machine."""
    from rich.markup import escape

    console = console_of(no_color, WIDE)  # wide enough for all
    wide = console.width >= WIDE
    columns = [name for name in COLUMNS if wide or name not in NOT_IF_NARROW]
    if report.partial:
        done = f"{report.settings['num_runs']} of {report.settings['num_runs_planned']} runs"
        console.print(f"PARTIAL: interrupted after {done}; prompts that all methods had decoded.", style="bold")
    for at in report.temperatures:
        table = new_table(columns, left=["prompts"], title=f"temperature {at.temperature:g}")
        for method in at.methods:
            several = len(method.categories) > 1
            for figures in [method.overall, *(method.categories if several else [])]:
                cells = _cells(method, figures)
                style = "bold" if figures is method.overall else None
                table.add_row(*(escape(cells.get(name, "")) for name in columns), style=style)
            if several:
                cells = _macro(method)
                table.add_row(*(escape(cells.get(name, "")) for name in columns))
            table.add_section()
        print_table(console, table)
        for method in at.methods:
            rates = method.overall.conditional_acceptance_per_pos
            if rates:
                listed = "  ".join(f"{rate:.2f}" for rate in rates)
                print_line(console, f"{method.label}: accepted by position, given the one before it: {listed}")
        _show_quality(console, at)
    methods = [method for at in report.temperatures for method in at.methods]
    different = dict.fromkeys(method.label for method in methods if method.exact and not method.identical_expected)
    lossy = dict.fromkeys(method.label for method in methods if not method.exact)
    if different:
        console.print(
            f"{', '.join(different)}: another text of the same distribution is expected, not the same tokens."
        )
    if lossy:
        console.print(f"{', '.join(lossy)}: LOSSY, the text has another distribution than the target's.", style="bold")
    notes = [f"{name}: {text}" for name, text in NOTES.items() if name in columns]
    if any(len(method.categories) > 1 for method in methods):
        notes.append("mean of N: over tasks or categories, each counting alike; the first line counts tokens.")
    if not wide:
        notes.append(f"A terminal of {WIDE} columns, or --json, shows more figures.")
    console.print(" ".join(notes))
    for line in _about(report):
        print_line(console, line)
    for at in report.temperatures:
        for method in at.methods:
            if method.possible is not None:
                print_line(console, f"{method.label}, temperature {at.temperature:g}: {method.possible.line}.")
        print_line(console, conclusion(at), "bold")


def conclusion(at: "TemperatureReport") -> str:
    """One sentence: which method is worth it at a temperature, by intervals. Means over prompts, tokens counted alike."""
    where = f"At temperature {at.temperature:g}"
    guessing = [method for method in at.methods if method.config["method"] != "none"]
    if not guessing:
        return f"{where} only plain decoding was measured."
    from foretell.bench.stats import best_of

    wide = {
        method.label: best_of(method.overall.speedup, len(guessing), method.overall.num_independent)
        for method in guessing
    }
    best = max(guessing, key=lambda method: method.overall.speedup.value)
    speedup = wide[best.label]
    of = f", as the best of {len(guessing)}" if len(guessing) > 1 else ""
    bounds = "" if speedup.is_point else f" [{speedup.low:.2f}, {speedup.high:.2f}{of}]"
    figure = f"{speedup.value:.2f} times plain decoding's tokens per second{bounds}"
    if speedup.is_point:
        return f"{where} {best.label} has {figure}; one prompt decides nothing: give more."
    if speedup.low > 1.0:
        others = [method.label for method in guessing if method is not best and wide[method.label].high >= speedup.low]
        tie = f"; not certainly faster than {', '.join(others)}" if others else ""
        return f"{where} {best.label} is the fastest: {figure}{tie}.{_same_text(best)}"
    if max(method.overall.speedup.high for method in guessing) < 1.0:
        return f"{where} guessing costs time here: the best, {best.label}, has {figure}."
    return (
        f"{where} no method is certainly faster than plain decoding: the best, {best.label}, has {figure}; more prompts "
        "narrow the interval."
    )


def _same_text(method: "MethodReport") -> str:
    """Whether the text is plain decoding's, as a further sentence."""
    whole = method.overall
    if not method.exact:
        return " It is lossy: the text has another distribution."
    if not method.identical_expected:
        return " Its text is another one of the same distribution."
    if whole.num_identical == whole.num_prompts:
        return " All texts are plain decoding's."
    return f" {whole.num_prompts - whole.num_identical} of {whole.num_prompts} texts differ from plain decoding's."


def _show_quality(console: "Console", at: "TemperatureReport") -> None:
    """A table of right answers, where any were judged."""
    from rich.markup import escape

    if not any(method.quality for method in at.methods):
        return
    columns = ("method", "judged", "right", "95 %", "plain alone", "method alone", "p")
    table = new_table(columns, title=f"right answers, temperature {at.temperature:g}")
    for method in at.methods:
        for number, part in enumerate(method.quality):
            pairs = (str(part.num_plain_only), str(part.num_method_only), f"{part.p_value:.3f}")
            table.add_row(
                escape(method.label if number == 0 else f"  {part.category}"), str(part.num_judged),
                f"{part.share.value:.1%}", f"{part.share.low:.1%} to {part.share.high:.1%}",
                *(pairs if method.config["method"] != "none" else ("", "", "")),
            )  # fmt: skip
    print_table(console, table)
    console.print(
        "95 %: Wilson. plain alone, method alone: questions that only one of the two has right. p: McNemar's exact test."
    )


def _cells(method: "MethodReport", f: "Figures") -> dict[str, str]:
    """Column to text; plain decoding has no cells for guesses."""
    cells = {
        "method": method.label if f is method.overall else f"  {f.category}",
        "prompts": str(f.num_prompts),
        "tok/s": f"{f.tokens_per_second:.1f}",
        "of limit": _number(f.share_of_bandwidth, "{:.0%}"),
        "outside": _number(f.share_outside_forwards, "{:.1%}"),
        "looped": f"{f.share_looped:.0%}",
    }
    if method.config["method"] == "none":
        return {**cells, "speedup": "1"}
    return {
        **cells,
        "speedup": str(f.speedup),
        "length": f"{f.mean_acceptance_length:.2f}",
        "rate": f"{f.acceptance_rate:.0%}",
        "c": _number(f.draft_cost, "{:.3f}"),
        "v": _number(f.verify_cost, "{:.2f}"),
        "model": _number(f.predicted_speedup, "{:.2f}"),
        "same": f"{f.num_identical}/{f.num_prompts}",
    }


def _macro(method: "MethodReport") -> dict[str, str]:
    """Column to text of the row of means over tasks."""
    mean, plain = method.macro, method.config["method"] == "none"
    return {
        "method": f"  mean of {mean.num_tasks}",
        "tok/s": f"{mean.tokens_per_second:.1f}",
        "speedup": "1" if plain else str(mean.speedup),
        "length": "" if plain else f"{mean.mean_acceptance_length:.2f}",
    }


def _about(report: "BenchReport") -> list[str]:
    s: dict[str, Any] = report.settings
    p, kv = report.provenance, s.get("kv", s["dtype"])
    ran = [
        f"{s['target']} ({s['architecture']}, {s['weight_bytes'] / 1e6:.1f} MB a pass)", s["implementation"],
        s["dtype"] if s["weights"] == s["dtype"] == kv else f"{s['weights']} weights, {kv} cache",
        f"{p['machine']['torch_threads']} threads",
        f"{_prompts(s)} x {s['max_new_tokens']} tokens x {s['rounds']} rounds",
        f"seed {s['seed']}",
    ]  # fmt: skip
    if s["width"]:
        ran.append(f"width {s['width']}")
    if s["num_prompts_too_long"]:
        ran.append(f"{s['num_prompts_too_long']} prompts longer than the context left out")
    on = [p["machine"]["processor"], f"peak memory {report.peak_rss_bytes / 2**20:.0f} MiB"]
    if report.dram_read_bytes_per_second is not None:
        on.append(f"DRAM read {report.dram_read_bytes_per_second / 1e9:.1f} GB/s")
    on.append(f"foretell {p['versions']['foretell']}, torch {p['versions']['torch']}")
    if p["git_revision"]:
        commit, changes, _ = p["git_revision"].partition("+changes")
        on.append(f"revision {commit[:12]}{' with uncommitted changes' if changes else ''}")
    sandbox = [f"programs were run in {s['sandbox']}"] if "sandbox" in s else []
    return [" · ".join(ran), " · ".join(on), *sandbox]


def _prompts(settings: dict[str, Any]) -> str:
    """How many prompts, and of how many questions where these have several messages."""
    prompts, questions = settings["num_prompts"], settings["num_questions"]
    return f"{prompts} prompts" if prompts == questions else f"{prompts} prompts of {questions} questions"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
