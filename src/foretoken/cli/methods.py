"""``foretoken methods``: what there is, what composes with what, and which is exact."""

import sys
from typing import Any

import typer

from foretoken.cli import options as o
from foretoken.cli.output import as_json, has_color


def methods(json_: o.Json = False, no_color: o.NoColor = False) -> None:
    """List methods of guessing, ways of checking, and what each pair of them does."""
    found = catalogue()
    if json_:
        typer.echo(as_json(found, pretty=sys.stdout.isatty()), nl=False)
    else:
        show(found, no_color=no_color)


def catalogue() -> dict[str, Any]:
    """Everything that METHODS and VERIFIERS declare, and every pair of the two."""
    from foretoken import METHODS, VERIFIERS, Law

    ways = {}
    for name, config in METHODS.items():
        can = config.capabilities
        needs = ["a draft model"] * can.needs_draft + ["a prediction"] * can.needs_prediction
        needs += ["hidden states"] * bool(can.taps)
        proposals = "none" if name == "none" else "drawn" if can.draws else "fixed"
        ways[name] = {"summary": can.summary, "proposals": proposals, "needs": needs}
    rules = {
        name: {"summary": rule.summary, "exact": rule.exact, "reads": sorted(rule.reads), "draws": rule.draws.name}
        for name, rule in VERIFIERS.items()
    }
    # A method that cannot draw proposes FIXED nodes whatever a rule asks for, and FIXED is sound under every rule.
    pairs = {
        name: {
            rule: {
                "law": verifier.draws.name if way["proposals"] == "drawn" else Law.FIXED.name,
                "exact": verifier.exact,
            }
            for rule, verifier in VERIFIERS.items()
        }
        for name, way in ways.items()
        if name != "none"
    }
    return {"methods": ways, "verifiers": rules, "pairs": pairs}


def show(found: dict[str, Any], *, no_color: bool) -> None:
    """Three tables."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    color = has_color(sys.stdout, no_color)
    width = None if sys.stdout.isatty() else 120
    console = Console(no_color=not color, highlight=False, width=width, soft_wrap=False)

    def table(*columns: str) -> Table:
        return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)

    ways = table("name", "guesses", "proposals", "needs")
    for name, way in found["methods"].items():
        ways.add_row(name, way["summary"], way["proposals"], ", ".join(way["needs"]) or "nothing")
    rules = table("name", "kind", "reads", "rule")
    for name, rule in found["verifiers"].items():
        rules.add_row(
            name, "exact" if rule["exact"] else "lossy", ", ".join(rule["reads"]) or "p alone", rule["summary"]
        )
    pairs = table("", *found["verifiers"])
    for name, row in found["pairs"].items():
        pairs.add_row(name, *(f"{pair['law']}, {'exact' if pair['exact'] else 'lossy'}" for pair in row.values()))
    console.print("Methods (--method): how the next tokens are guessed", style="bold")
    console.print(ways)
    console.print("Verifiers (--verify): how guesses are checked", style="bold")
    console.print(rules)
    console.print("Every pair composes. How the method's tokens are drawn under the rule:", style="bold")
    console.print(pairs)
    console.print(
        "FIXED: by no chance the rule would have to correct for (always sound). COUPLED: from the target's own noise.\n"
        "IID: from the draft's law q, which the rule reads. exact: the text has the target's law; under coupled and\n"
        "exact it is even the same text, token for token, with any method or none."
    )
