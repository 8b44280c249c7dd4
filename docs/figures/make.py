"""Draw the documents' figures from the tables that stand in them: ``python docs/figures/make.py``.

A figure shows what its table says and nothing else: the numbers are read from the Markdown, so there is one copy of
each. Every SVG carries a hash of its numbers; tests/test_docs.py fails where a table changed and the figure did not.
"""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent
Rows = list[list[str]]
Numbers = dict[str, list[float]]

BLUE, ORANGE, GREEN, RED, GREY = "#2b6cb0", "#dd6b20", "#2f855a", "#c53030", "#718096"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "foretell",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def table(page: str, header: str) -> Rows:
    """Cells of the first table of docs/page whose header line contains ``header``, which is row 0. Raises ValueError."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    for start, line in enumerate(lines):
        if line.startswith("|") and header in line:
            stop = next((at for at in range(start, len(lines)) if not lines[at].startswith("|")), len(lines))
            rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in lines[start:stop]]
            return [rows[0], *rows[2:]]
    raise ValueError(f"docs/{page} has no table with {header!r} in its header")


def numbers(cell: str) -> list[float]:
    """The numbers of a cell, in order; thousands separated by commas."""
    return [float(found.replace(",", "")) for found in re.findall(r"\d[\d,]*(?:\.\d+)?", re.sub(r"[*`]", "", cell))]


# -- what each figure shows ----------------------------------------------------------------------------------------------


def speedup_data() -> Numbers:
    """(speedup, low, high) by method, temperature and dtype: performance.md, inflated target."""
    data = {}
    for dtype, temperature, method, _, speedup, *_ in table("performance.md", "tokens/s plain → speculative")[1:]:
        data[f"{method}, {dtype}, T = {temperature}"] = numbers(speedup)
    return data


def draw_speedup(axes: Axes, data: Numbers) -> None:
    """A point and its interval for each row."""
    labels = list(data)
    for place, (label, (middle, low, high)) in enumerate(data.items()):
        colour = ORANGE if label.startswith("ngram") else BLUE
        axes.errorbar(middle, place, xerr=[[middle - low], [high - middle]], fmt="o", color=colour, capsize=3)
        axes.annotate(f"{middle:.2f}", (middle, place), xytext=(0, 6), textcoords="offset points", ha="center", size=8)
    axes.axvline(1.0, color=GREY, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_ylim(len(labels) - 0.5, -0.8)
    axes.set_xlabel("speedup over plain decoding, 95 % interval")


def shapes_data() -> Numbers:
    """Mean acceptance length by shape for 4, 8, 16, 32, 64 guesses at temperature 1: performance.md."""
    rows = table("performance.md", "T = 0: 4 | 8 | 16 | 32 | 64 | T = 0.6")
    return {row[0].strip("`"): [numbers(cell)[0] for cell in row[11:16] if numbers(cell)] for row in rows[1:]}


def draw_shapes(axes: Axes, data: Numbers) -> None:
    """A line for each shape."""
    for label, lengths in data.items():
        axes.plot([4, 8, 16, 32, 64][: len(lengths)], lengths, marker="o", markersize=4, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks([4, 8, 16, 32, 64], ["4", "8", "16", "32", "64"])
    axes.set_xlabel("guesses in a step")
    axes.set_ylabel("mean acceptance length, T = 1")
    axes.legend(frameon=False, fontsize=8, ncols=2)


RULES = {
    "rejection, iid": GREY,
    "transport, iid": GREEN,
    "rejection, without replacement": ORANGE,
    "coupled, coupled": BLUE,
    "exact, fixed": RED,
}


def rules_data() -> Numbers:
    """Chance that one of four drafts is accepted, at T = 0.3, 0.6, 1 and 1.2: verification.md."""
    found = {}
    for drafts, rule, *cells in table("verification.md", "| drafts | rule, draws |")[1:]:
        name = re.sub(r"[`*]", "", rule)
        if drafts == "4" and name in RULES:
            found[name] = [numbers(cell)[0] for cell in cells]
    return found


def draw_rules(axes: Axes, data: Numbers) -> None:
    """A line for each rule."""
    for name, chances in data.items():
        axes.plot([0.3, 0.6, 1.0, 1.2], chances, marker="o", markersize=4, color=RULES[name], label=name)
    axes.set_xlabel("temperature")
    axes.set_ylabel("one of four drafts accepted")
    axes.legend(frameon=False, fontsize=8)


def drafters_data() -> Numbers:
    """(mean acceptance length, speedup) by method at temperature 0, inflated target: drafters.md, its second table."""
    text = (DOCS / "drafters.md").read_text(encoding="utf-8").split("## Decoding it at the cost of a large model")[1]
    found = {}
    for line in text.split("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 10 and cells[1] == "0" and cells[0] != "none":
            found[cells[0]] = [float(cells[3]), numbers(cells[7])[0]]
    return found


def draw_drafters(axes: Axes, data: Numbers) -> None:
    """A point for each method."""
    for name, (length, speedup) in data.items():
        axes.plot(length, speedup, "o", color=BLUE)
        axes.annotate(name, (length, speedup), xytext=(5, 4), textcoords="offset points", size=8)
    axes.axhline(1.0, color=GREY, linestyle="--", linewidth=1)
    axes.set_xlabel("mean acceptance length, T = 0")
    axes.set_ylabel("speedup over plain decoding")


PARTS = ("target's pass", "draft's passes", "grow", "draw", "laws")


def step_data() -> Numbers:
    """Milliseconds of one step by part, `coupled` on a chain: verification.md."""
    rows = table("verification.md", "| rule, shape, depth 5 | step |")
    row = next(row for row in rows if row[0] == "`coupled`, chain")
    return {part: [numbers(row[rows[0].index(part)])[0] / 1000] for part in PARTS}


def draw_step(axes: Axes, data: Numbers) -> None:
    """A bar for each part; in brackets the section of how-a-step-works.md."""
    names = {
        "target's pass": "target's pass (3)",
        "draft's passes": "draft model's five passes (1)",
        "grow": "rest of proposing (1)",
        "draw": "verify (5)",
        "laws": "logits to probabilities (4)",
    }
    for place, (part, (value,)) in enumerate(data.items()):
        axes.barh(place, value, color=BLUE if part == "target's pass" else ORANGE)
        axes.annotate(f"{value:.1f} ms", (value, place), xytext=(4, 0), textcoords="offset points", va="center", size=8)
    axes.set_yticks(range(len(data)), [names[part] for part in data])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds in one step")


def serving_data() -> Numbers:
    """tokens/s of (plain, best fixed length, auto) by requests at once, bundled target: serving.md."""
    rows = table("serving.md", "| requests at once | plain, tokens/s |")
    return {row[0]: [numbers(cell)[0] for cell in row[1:4]] for row in rows[1:]}


def draw_serving(axes: Axes, data: Numbers) -> None:
    """Three bars for each load."""
    for arm, (name, colour) in enumerate([("plain", GREY), ("best fixed length", ORANGE), ("auto", BLUE)]):
        places = [place + 0.27 * (arm - 1) for place in range(len(data))]
        axes.bar(places, [arms[arm] for arms in data.values()], 0.25, color=colour, label=name)
    axes.set_xticks(range(len(data)), list(data))
    axes.set_xlabel("requests at once")
    axes.set_ylabel("tokens/s")
    axes.legend(frameon=False, fontsize=8)


FIGURES: dict[str, tuple[Callable[[], Numbers], Callable[[Axes, Numbers], None], tuple[float, float]]] = {
    "speedup": (speedup_data, draw_speedup, (6.4, 3.2)),
    "shapes": (shapes_data, draw_shapes, (6.4, 3.6)),
    "rules": (rules_data, draw_rules, (6.4, 3.4)),
    "drafters": (drafters_data, draw_drafters, (6.4, 3.6)),
    "step": (step_data, draw_step, (6.4, 2.2)),
    "serving": (serving_data, draw_serving, (6.4, 3.0)),
}


def fingerprint(data: Numbers) -> str:
    """What the SVG says of its numbers."""
    return "numbers " + hashlib.sha256(repr(sorted(data.items())).encode()).hexdigest()[:16]


def main() -> None:
    """Write every figure."""
    with mpl.rc_context(STYLE):
        for name, (read, draw, size) in FIGURES.items():
            data = read()
            figure, axes = plt.subplots(figsize=size, layout="constrained")
            figure.patch.set_facecolor("white")
            draw(axes, data)
            where = HERE / f"{name}.svg"
            figure.savefig(where, metadata={"Date": None, "Creator": None, "Description": fingerprint(data)})
            plt.close(figure)
            text = "\n".join(line.rstrip() for line in where.read_text(encoding="utf-8").splitlines())
            where.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
