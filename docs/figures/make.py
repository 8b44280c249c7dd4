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


def readme_data() -> Numbers:
    """(tokens/s without, tokens/s with foretell, ratio) of each row: README.md."""
    rows = table("../README.md", "| without, tokens/s |")[1:]
    return {row[0]: [numbers(cell)[0] for cell in row[1:4]] for row in rows}


def draw_readme(axes: Axes, data: Numbers) -> None:
    """Two bars for each row, the first of them 1, as models differ in speed; at the bars tokens a second."""
    for place, (without, ours, ratio) in enumerate(data.values()):
        for shift, size, speed, colour in ((-0.2, 1.0, without, GREY), (0.2, ratio, ours, BLUE)):
            axes.barh(place + shift, size, 0.36, color=colour)
            axes.annotate(
                f"{speed:g}", (size, place + shift), xytext=(4, 0), textcoords="offset points", va="center", size=8
            )
    axes.set_yticks(range(len(data)), list(data))
    axes.invert_yaxis()
    axes.set_xlabel("speed: without guesses, or theirs (grey) = 1, foretell's (blue)")


def shapes_data() -> Numbers:
    """Mean acceptance length by shape for 4, 8, 16, 32, 64 guesses at temperature 1: performance.md."""
    rows = table("performance.md", "| length at T = 1, shape |")
    return {row[0].strip("`"): [numbers(cell)[0] for cell in row[1:6] if numbers(cell)] for row in rows[1:]}


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
    """(mean acceptance length, speedup) by method at temperature 0, inflated target: drafters.md, its last such table."""
    rows = rows_between("drafters.md", "| method | length, T = 0 | speedup, T = 0 |", last=True)
    return {row[0]: [float(row[1]), numbers(row[2])[0]] for row in rows}


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


def rows_between(page: str, header: str, *, last: bool = False) -> Rows:
    """Rows of the first table with that header, or (last) of the last one, without its header."""
    if not last:
        return table(page, header)[1:]
    text = (DOCS / page).read_text(encoding="utf-8")
    start = text.rindex(header)
    lines = text[text.rindex("\n", 0, start) + 1 :].splitlines()
    stop = next((at for at, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:stop]]


TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")


def specbench_data() -> Numbers:
    """Ratio to plain decoding by task, for each method: performance.md."""
    return {
        row[0].strip("`"): [float(cell) for cell in row[3:9]] for row in table("performance.md", "| mt_bench |")[1:]
    }


def draw_specbench(axes: Axes, data: Numbers) -> None:
    """Bars in groups of a task."""
    grouped_bars(axes, data, [task.replace("_", "\n") for task in TASKS], (GREY, GREEN, ORANGE, BLUE))
    axes.set_ylabel("tokens/s, of plain decoding's")
    axes.axhline(1.0, color="black", linestyle="--", linewidth=1)
    axes.set_ylim(0, 2.35)


def grouped_bars(axes: Axes, data: Numbers, groups: list[str], colours: tuple[str, ...]) -> None:
    """A bar for every key of the data in every group, and a legend."""
    width = 0.8 / len(data)
    for arm, ((name, heights), colour) in enumerate(zip(data.items(), colours, strict=False)):
        places = [place + width * (arm - (len(data) - 1) / 2) for place in range(len(groups))]
        axes.bar(places, heights, width * 0.92, color=colour, label=name)
    axes.set_xticks(range(len(groups)), groups)
    axes.legend(frameon=False, fontsize=8, ncols=len(data), loc="upper center")


def llamacpp_data() -> Numbers:
    """(llama.cpp, our passes, our engine) in tokens/s by file, AVX-512: performance.md."""
    rows = table("performance.md", "| file | limit | llama.cpp |")[1:]
    return {row[0].replace(" (embedding Q8_0)", ""): [float(cell) for cell in row[2:5]] for row in rows}


def draw_llamacpp(axes: Axes, data: Numbers) -> None:
    """Three bars for each file, on a logarithmic axis."""
    names = ("llama.cpp", "passes of foretell", "a whole request of foretell")
    for arm, (name, colour) in enumerate(zip(names, (GREY, BLUE, GREEN), strict=True)):
        places = [place + 0.27 * (arm - 1) for place in range(len(data))]
        axes.barh(places, [arms[arm] for arms in data.values()], 0.25, color=colour, label=name)
    axes.set_yticks(range(len(data)), list(data))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xticks([30, 60, 120, 240, 480], ["30", "60", "120", "240", "480"])
    axes.minorticks_off()
    axes.set_xlabel("tokens/s, plain decoding")
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def distance_data() -> Numbers:
    """(mean KL, largest KL) in nats by model and weights: performance.md."""
    found, model = {}, ""
    for name, weights, _, distance, *_ in table("performance.md", "| model | weights | positions |")[1:]:
        model = model if not name or name.startswith("the same") else name
        kind = "GGUF, the file's own" if name.startswith("the same") else weights
        mean, largest = (float(one) for one in re.findall(r"\d[\d.]*(?:e-\d+)?", distance))
        found[f"{model}, {kind}"] = [mean, largest]
    return found


def draw_distance(axes: Axes, data: Numbers) -> None:
    """A line from the mean to the largest of each, on a logarithmic axis."""
    for place, (mean, largest) in enumerate(data.values()):
        axes.plot([mean, largest], [place, place], color=BLUE, linewidth=1)
        axes.plot(mean, place, "o", color=BLUE, label="mean" if place == 0 else None)
        axes.plot(largest, place, "|", color=BLUE, markersize=10, label="largest" if place == 0 else None)
    axes.set_yticks(range(len(data)), list(data))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("distance from the unquantised model, KL in nats")
    axes.legend(frameon=False, fontsize=8)


def transformers_data() -> Numbers:
    """tokens/s in (fp32, bf16): performance.md."""
    return {row[0]: [float(cell) for cell in row[1:]] for row in table("performance.md", "| tokens/s | fp32 |")[1:5]}


def draw_transformers(axes: Axes, data: Numbers) -> None:
    """Bars of four ways to decode, for each dtype."""
    grouped_bars(axes, data, ["fp32", "bf16"], (GREY, ORANGE, GREEN, BLUE))
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    axes.set_ylabel("tokens/s")


def slots_data() -> Numbers:
    """Chance that a guess is kept, by slot, for each head: drafters.md."""
    rows = table("drafters.md", "| head | parameters | slot 1 |")[1:]
    return {row[0].split("`")[1]: [float(cell) for cell in row[2:6] if cell] for row in rows}


def draw_slots(axes: Axes, data: Numbers) -> None:
    """A line for each head."""
    for name, chances in data.items():
        axes.plot(range(1, len(chances) + 1), chances, marker="o", markersize=4, label=name)
    axes.set_xticks([1, 2, 3, 4])
    axes.set_ylim(0, 1)
    axes.set_xlabel("slot: how many tokens ahead")
    axes.set_ylabel("kept, given those before it")
    axes.legend(frameon=False, fontsize=8, ncols=3)


def lengths_data() -> Numbers:
    """(mean acceptance length at T = 0.6, ±, at T = 1, ±) by lines, draws and rule: verification.md."""
    found = {}
    for lines, draws, rule, warm, _, hot, *_ in table("verification.md", "| lines | draws | rule |")[1:]:
        found[f"{lines} × {draws}: {rule.strip('`')}"] = [*numbers(warm)[:2], *numbers(hot)[:2]]
    return found


def draw_lengths(axes: Axes, data: Numbers) -> None:
    """Two points and their ± for each rule."""
    for place, (warm, its, hot, other) in enumerate(data.values()):
        axes.errorbar(
            warm, place - 0.14, xerr=its, fmt="o", color=BLUE, capsize=2, label="T = 0.6" if not place else None
        )
        axes.errorbar(
            hot, place + 0.14, xerr=other, fmt="s", color=ORANGE, capsize=2, label="T = 1" if not place else None
        )
    axes.set_yticks(range(len(data)), list(data), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("mean acceptance length; ± of the mean over prompts")
    axes.legend(frameon=False, fontsize=8)


def stopping_data() -> Numbers:
    """(gain, low, high) in percent by temperature, cost of a guess and policy: drafters.md."""
    found = {}
    header = "| c | policy | tokens a pass | gain |"
    for temperature, last in ((0, False), (1, True)):
        for cost, policy, *_, gain in rows_between("drafters.md", header, last=last):
            values = [float(one) for one in re.findall(r"[-+]?\d+(?:\.\d+)?(?=%)", gain)]
            if values:
                found[f"{policy}, T = {temperature}, c = {cost}"] = values if len(values) == 3 else values * 3
    return found


def draw_intervals(axes: Axes, data: Numbers, *, at: float, label: str) -> None:
    """A point and its interval for each row, against a line of no gain."""
    for place, (name, (middle, low, high)) in enumerate(data.items()):
        colour = GREY if name.startswith("oracle") else BLUE if middle > at else RED
        axes.errorbar(middle, place, xerr=[[middle - low], [high - middle]], fmt="o", color=colour, capsize=3)
    axes.axvline(at, color=GREY, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(data)), list(data))
    axes.invert_yaxis()
    axes.set_xlabel(label)


def draw_stopping(axes: Axes, data: Numbers) -> None:
    """See ``draw_intervals``."""
    draw_intervals(axes, data, at=0.0, label="gain over the best fixed length in percent, 95 % interval")


FIGURES: dict[str, tuple[Callable[[], Numbers], Callable[[Axes, Numbers], None], tuple[float, float]]] = {
    "readme": (readme_data, draw_readme, (6.8, 4.0)),
    "speedup": (speedup_data, draw_speedup, (6.4, 2.6)),
    "shapes": (shapes_data, draw_shapes, (6.4, 3.6)),
    "rules": (rules_data, draw_rules, (6.4, 3.4)),
    "drafters": (drafters_data, draw_drafters, (6.4, 3.6)),
    "step": (step_data, draw_step, (6.4, 2.2)),
    "serving": (serving_data, draw_serving, (6.4, 3.0)),
    "specbench": (specbench_data, draw_specbench, (6.8, 3.2)),
    "llamacpp": (llamacpp_data, draw_llamacpp, (6.8, 3.8)),
    "distance": (distance_data, draw_distance, (6.8, 2.8)),
    "transformers": (transformers_data, draw_transformers, (5.6, 3.0)),
    "slots": (slots_data, draw_slots, (5.6, 3.2)),
    "lengths": (lengths_data, draw_lengths, (6.8, 3.6)),
    "stopping": (stopping_data, draw_stopping, (6.8, 4.6)),
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
