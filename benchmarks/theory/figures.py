"""The optimum's table as text, CSV and a plot."""

import csv
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.theory.table import OptimumTable, RuleAcceptance

FIELDS = ("temperature", "num_drafts", "rule", "draws", "acceptance", "standard_error", "optimum", "share_of_optimum")


def optimum_rows(table: "OptimumTable") -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """(title, columns, cells) of one table a temperature: rules down, numbers of drafts across."""
    for temperature in dict.fromkeys(cell.temperature for cell in table.cells):
        cells = [cell for cell in table.cells if cell.temperature == temperature]
        counts = sorted({cell.num_drafts for cell in cells})
        rows = []
        for draws in dict.fromkeys(cell.draws for cell in cells):
            of_draws = [cell for cell in cells if cell.draws == draws]
            for rule in dict.fromkeys(cell.rule for cell in of_draws):
                found = {cell.num_drafts: cell for cell in of_draws if cell.rule == rule}
                rows.append((f"{rule}, {draws}", *(_cell(found.get(count)) for count in counts)))
            best = {cell.num_drafts: cell.optimum for cell in of_draws}
            if any(value is not None for value in best.values()):
                limits = (best.get(count) for count in counts)
                rows.append((f"  optimum, {draws}", *("" if x is None else f"{x:.4f}" for x in limits)))
        yield f"temperature {temperature:g}", ("acceptance for drafts:", *map(str, counts)), rows


def _cell(cell: "RuleAcceptance | None") -> str:
    if cell is None:
        return ""
    share = "" if cell.share_of_optimum is None else f" ({100 * cell.share_of_optimum:.1f} %)"
    return f"{cell.acceptance:.4f} +-{cell.standard_error:.3f}{share}"


def csv_of(table: "OptimumTable") -> str:
    """One line a cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(FIELDS)
    writer.writerows([getattr(cell, field) for field in FIELDS] for cell in table.cells)
    return out.getvalue()


def draw_plot(table: "OptimumTable", file: str) -> None:
    """One panel a temperature: acceptance against the number of drafts, optima dashed. Raises ConfigError where
    matplotlib is not installed."""
    from foretell.core.errors import ConfigError

    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    at = list(dict.fromkeys(cell.temperature for cell in table.cells))
    columns = min(3, len(at))
    figure, panels = pyplot.subplots(
        -(-len(at) // columns), columns, figsize=(5 * columns, 3.6 * -(-len(at) // columns)), squeeze=False, sharey=True
    )
    flat: list[Any] = list(panels.flat)
    for panel in flat[len(at) :]:
        panel.set_axis_off()
    for panel, temperature in zip(flat, at, strict=False):
        cells = [cell for cell in table.cells if cell.temperature == temperature]
        colors: dict[str, Any] = {}
        for rule, draws in dict.fromkeys((cell.rule, cell.draws) for cell in cells):
            line = [cell for cell in cells if (cell.rule, cell.draws) == (rule, draws)]
            counts = [cell.num_drafts for cell in line]
            drawn = panel.plot(counts, [cell.acceptance for cell in line], marker=".", label=f"{rule}, {draws}")[0]
            colors.setdefault(draws, drawn.get_color())
        for draws, color in colors.items():
            best = {cell.num_drafts: cell.optimum for cell in cells if cell.draws == draws and cell.optimum is not None}
            if best and draws != "fixed":
                panel.plot(list(best), list(best.values()), "--", color=color, linewidth=1, label=f"optimum, {draws}")
        panel.set_title(f"temperature {temperature:g}")
        panel.set_xlabel("drafts for one token")
        panel.legend(fontsize=6)
    flat[0].set_ylabel("acceptance")
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
