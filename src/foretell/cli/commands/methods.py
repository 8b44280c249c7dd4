"""``foretell methods``: lists methods, shapes and verifiers, their legal combinations, and which are exact."""

import dataclasses
import json
import re
import warnings
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import early, options as o
from foretell.cli.layout import console_of, print_table
from foretell.cli.output import deliver
from foretell.core import builtin
from foretell.core.registry import names_of

if TYPE_CHECKING:
    from foretell.core.registry import Registry

WIDE = 140  # columns, where the output is no terminal
BRIEF = early.FILE
"""``brief`` of what comes with foretell, so that the list needs no torch: ``python -m foretell.cli.commands.methods``
makes it."""
All = Annotated[
    bool, typer.Option("--all", help="Options, what each rule does, and every refused combination with its reason.")
]


def methods(all_: All = False, json_: o.Json = False, no_color: o.NoColor = False) -> None:
    """List methods of guessing, ways of checking, and what works with what."""
    if not all_ and not json_:
        show_brief(known_brief(), no_color=no_color)
        return
    with warnings.catch_warnings():  # what is refused is listed
        warnings.simplefilter("ignore", RuntimeWarning)
        found = catalogue()
    deliver(found, json_=json_, show=lambda: show(found, no_color=no_color))


def known_brief() -> dict[str, Any]:
    """``brief`` of what is installed: read from its file where no package adds anything."""
    parts = (("methods", builtin.CONFIGS), ("verifiers", builtin.VERIFIERS), ("shapes", builtin.SHAPES))
    if all(set(names_of(known, f"foretell.{part}")) == set(known) for part, known in parts):
        return early.known()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return brief(catalogue())


def brief(found: dict[str, Any]) -> dict[str, Any]:
    """Of a catalogue, what one screen shows: name -> [what it does, the names of shapes that it works with]."""
    ways, shapes = found["methods"], list(found["shapes"])
    refused = {  # verifier -> shapes that it takes from no method that can grow them
        rule: {
            shape
            for shape in shapes
            if all(
                shape in row[rule]["refused"] for name, row in found["pairs"].items() if shape in ways[name]["shapes"]
            )
        }
        for rule in found["verifiers"]
    }
    told = {name: _told(way) + _needs(way["needs"]) for name, way in ways.items()}
    return {
        "methods": {name: [told[name], _works_with(way["shapes"], shapes)] for name, way in ways.items()},
        "shapes": {name: _told(form) for name, form in found["shapes"].items()},
        "verifiers": {
            name: [
                ("" if rule["exact"] else "LOSSY: ") + _told(rule),
                _works_with([shape for shape in shapes if shape not in refused[name]], shapes),
            ]
            for name, rule in found["verifiers"].items()
        },
        "not_used": found["not_used"],
        "options": _kinds(),
    }


def _kinds() -> dict[str, Any]:
    """What ``early`` checks: the defaults of verifiers' options, and the types of methods' and trainings'."""
    from foretell import METHODS, VERIFIERS
    from foretell.core.settings import field_kinds
    from foretell.heads.formats import HEADS
    from foretell.train.making import option_kind
    from foretell.train.methods import labelled, recipe_of

    def called(kinds: dict[str, Any]) -> dict[str, str]:
        names = {kind: name for name, kind in early.KINDS.items()}
        return {key: names.get(kind, "") for key, kind in kinds.items()}

    learned = [name for name in builtin.TRAINING if labelled(name) is None]
    return {
        "verifiers": {name: _options(VERIFIERS[name]) for name in VERIFIERS.builtin},
        "methods": {name: called(field_kinds(METHODS[name])) for name in METHODS.builtin},
        "training": {
            name: called({key: option_kind(key, default) for key, default in recipe_of(name).options.items()})
            for name in learned
        },
        "layouts": [*HEADS.builtin, "gguf"],
    }


def _told(item: dict[str, Any]) -> str:
    """The first of the parts of a summary, and the package where that is another than foretell."""
    from foretell import __version__

    parts = r"; |: | \([A-Z]|, in |, for |, else |, then |, less so |, by one "
    first = re.split(parts, item["summary"].removeprefix("lossy: "))[0].strip()
    return first if item["package"] == f"foretell {__version__}" else f"{first} ({item['package']})"


def _needs(needs: list[str]) -> str:
    trained = [need for need in needs if need != "hidden states"]  # which every target has
    return f" [{trained[0].removeprefix('a ')}]" if trained else ""


def _works_with(mine: list[str], every: list[str]) -> str:
    lacking = [name for name in every if name not in mine]
    if not lacking or not mine:
        return "-" if not mine else "all shapes"
    return f"all but {', '.join(lacking)}" if len(lacking) < len(mine) else ", ".join(mine)


def show_brief(found: dict[str, Any], *, no_color: bool) -> None:
    """One screen."""
    console = console_of(no_color, soft_wrap=True)

    def part(title: str, rows: dict[str, Any]) -> None:
        console.print(title, style="bold", markup=False)
        for name, told in rows.items():
            what, shapes = (told, "") if isinstance(told, str) else told
            works = "" if shapes in ("", "-", "all shapes") else f" (works with shapes {shapes})"
            console.print(f"  {name:<13} {what}{works}", markup=False)

    part("Methods (--method): how the next tokens are guessed [and what they need]", found["methods"])
    part("Shapes (--shape): how many guesses, and where they branch", found["shapes"])
    part("Verifiers (--verify): how guesses are checked; exact ones keep the target's distribution", found["verifiers"])
    if found["not_used"]:
        part("Declared by installed packages, and not used:", dict.fromkeys(found["not_used"], ""))
    console.print(
        "Where nothing is said, a method or verifier works with every other part. More: foretell methods --all"
    )


def catalogue() -> dict[str, Any]:
    """Everything that METHODS, SHAPES and VERIFIERS declare, and every combination with the reason where it is refused.

    "package" is where a name comes from; "not_used" are names of packages that cannot be used, with the reason.
    """
    from foretell import HEADS, METHODS, SHAPES, VERIFIERS, DrawMode
    from foretell.draft.config import refusal

    ways = {}
    for name, config in METHODS.items():
        can = config.capabilities
        needs = ["a draft model"] * can.needs_draft + ["a prediction"] * can.needs_prediction
        needs += ["a trained head"] * can.needs_head + ["hidden states"] * can.reads_target
        proposals = "none" if name == "none" else "drawn" if can.draws else "fixed"
        shapes = [] if name == "none" else list(can.shapes)
        ways[name] = {
            "summary": can.summary,
            "proposals": proposals,
            "needs": needs,
            "shapes": shapes,
            "package": _package(METHODS, name),
        }
    rules = {
        name: {
            "summary": rule.summary,
            "exact": rule.exact,
            "reads": sorted(rule.reads),
            "draws": rule.draws.value,
            "distance": rule.distance,
            "options": _options(rule),
            "package": _package(VERIFIERS, name),
        }
        for name, rule in VERIFIERS.items()
    }
    forms = {
        name: {
            "summary": shape.summary,
            "chain": shape.is_chain,
            "fixed": shape.fixed,
            "options": _options(shape),
            "package": _package(SHAPES, name),
        }
        for name, shape in SHAPES.items()
    }
    # A method that cannot draw proposes FIXED nodes for every rule, and FIXED is sound under every rule.
    pairs = {
        name: {
            rule: {
                "draws": verifier.draws.value if way["proposals"] == "drawn" else DrawMode.FIXED.value,
                "exact": verifier.exact,
                "refused": {
                    form: reason
                    for form, shape in SHAPES.items()
                    if (reason := refusal(name, METHODS[name].capabilities, verifier, shape, None)) is not None
                },
            }
            for rule, verifier in VERIFIERS.items()
        }
        for name, way in ways.items()
        if name != "none"
    }
    not_used = {**METHODS.refused, **VERIFIERS.refused, **SHAPES.refused, **HEADS.refused}
    return {"methods": ways, "verifiers": rules, "shapes": forms, "pairs": pairs, "not_used": sorted(not_used.values())}


def _package(known: "Registry[Any]", name: str) -> str:
    """Where a name comes from."""
    from foretell import __version__

    origin = known.origin(name)
    return f"foretell {__version__}" if origin is None else str(origin)


def _options(value: Any) -> dict[str, Any]:
    """Fields and defaults of a verifier or a shape that can be written as text."""
    return {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if field.init
        and field.metadata.get("spec", True)
        and isinstance(getattr(value, field.name), (bool, int, float, str, tuple))
    }


def show(found: dict[str, Any], *, no_color: bool) -> None:
    """Four tables."""
    from rich import box
    from rich.table import Table

    from foretell import SHAPES

    console = console_of(no_color, WIDE, soft_wrap=False)

    def table(*columns: str) -> Table:
        return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)

    def spell(name: str, options: dict[str, Any]) -> str:
        return name if not options else name + "".join(f" /{key}={_plain(value)}" for key, value in options.items())

    packages = {item["package"] for part in ("methods", "verifiers", "shapes") for item in found[part].values()}
    source = ("package",) if len(packages) > 1 else ()  # a column only where names come from several packages
    ways = table("name", "guesses", "proposals", "needs", "shapes", *source)
    every = len(SHAPES.builtin)
    for name, way in found["methods"].items():
        shapes = "all" if len(way["shapes"]) == every else ", ".join(way["shapes"]) or "-"
        needs = ", ".join(way["needs"]) or "nothing"
        ways.add_row(name, way["summary"], way["proposals"], needs, shapes, *([way["package"]] if source else []))
    rules = table("name", "kind", "reads", "asks for", "rule", *source)
    for name, rule in found["verifiers"].items():
        said = f"{rule['summary']} ({rule['distance']})" if rule["distance"] else rule["summary"]
        reads = ", ".join(rule["reads"]) or "p alone"
        kind, origin = "exact" if rule["exact"] else "LOSSY", [rule["package"]] if source else []
        rules.add_row(spell(name, rule["options"]), kind, reads, rule["draws"], said, *origin)
    forms = table("name", "tree", "shape", *source)
    for name, form in found["shapes"].items():
        tree = "chain" if form["chain"] else "fixed" if form["fixed"] else "as drawn"
        forms.add_row(spell(name, form["options"]), tree, form["summary"], *([form["package"]] if source else []))
    console.print("Methods (--method): how the next tokens are guessed", style="bold")
    print_table(console, ways)
    console.print("Shapes (--shape): how many guesses, and where they branch", style="bold")
    print_table(console, forms)
    console.print("Verifiers (--verify): how guesses are checked", style="bold")
    print_table(console, rules)
    console.print("Refused, of the shapes that a method can grow (all else composes):", style="bold")
    grown = {name: way["shapes"] for name, way in found["methods"].items()}
    refused = [
        f"  {name} + {rule} + {form}: {reason}"
        for name, row in found["pairs"].items()
        for rule, pair in row.items()
        for form, reason in pair["refused"].items()
        if form in grown[name]
    ]
    console.print("\n".join(refused) or "  nothing")
    if found["not_used"]:
        console.print("Declared by installed packages, and not used:", style="bold red")
        console.print("\n".join(f"  {message}" for message in found["not_used"]), markup=False)
    console.print(
        "\nHow children are drawn (--draws; by default as the rule asks): fixed: the most probable ones, sound under every "
        "rule. coupled: by the target's own noise. iid, without_replacement, greedy: from the draft's "
        "distribution q, which the "
        "rule reads. list: by one noise for each draft. exact: the text has the target's distribution; under "
        "coupled and exact it "
        "is even the same text, token for token, with any method, any shape or none. LOSSY: it has another distribution."
    )


def _plain(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()


if __name__ == "__main__":
    BRIEF.write_text(json.dumps(brief(catalogue()), indent=1) + "\n", encoding="utf-8")
