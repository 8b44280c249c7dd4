"""Write the model cards from the files that the other recipes left: every number in a card comes from a run."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

HERE = Path(__file__).parent
CATEGORIES = ("code", "prose", "questions", "copies", "problems", "files_code", "files_prose")
LICENCE = "Apache-2.0"


def packages() -> str:
    """Markdown table rows: package, version, licence, from the requirement files."""
    rows: list[tuple[str, str, str]] = []
    for name in ("requirements-sdists.txt", "requirements-wheels.txt"):
        rows += re.findall(r"^(\S+)==(\S+) --hash=\S+\s+# (.*)$", (HERE / name).read_text(), re.M)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def load(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_text())


def last_line(path: Path) -> dict[str, Any]:
    """The last entry of a loss file."""
    return json.loads(path.read_text().splitlines()[-1])


def progress(checkpoint: Path) -> dict[str, Any]:
    """Where a run ended."""
    return dict(torch.load(checkpoint, map_location="cpu", weights_only=True)["progress"])


def figures(value: float | list[float]) -> str:
    """A loss, or several, with three digits."""
    return ", ".join(f"{v:.3f}" for v in value) if isinstance(value, list) else f"{value:.3f}"


def loss_table(path: Path, key: str, rows: int = 12) -> str:
    """Some lines of a loss file, as a Markdown table."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = sorted(
        {line["step"]: line for line in lines}.values(), key=lambda line: line["step"]
    )  # resumed runs repeat
    chosen = lines[:: max(1, len(lines) // rows)]
    chosen = chosen if chosen[-1] is lines[-1] else [*chosen, lines[-1]]
    return "\n".join(
        f"| {x['step']} | {x['tokens']:,} | {x['elapsed_s'] / 60:.1f} | {figures(x[key])} |" for x in chosen
    )


def parameters(folder: Path) -> int:
    """Number of parameters in a model folder."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        sizes = [file.get_slice(key).get_shape() for key in file.keys()]  # noqa: SIM118 - not a dict
    total = 0
    for shape in sizes:
        count = 1
        for n in shape:
            count *= n
        total += count
    return total


def bits_table(target: dict[str, Any], ngram: dict[str, Any]) -> str:
    """Bits per byte of both models."""
    return "\n".join(
        f"| {c} | {target[c]:.3f} | {ngram[c]:.3f} | {100 * (1 - target[c] / ngram[c]):.1f} % |" for c in CATEGORIES
    )


def acceptance_table(found: dict[str, Any]) -> str:
    """Acceptance by category."""
    keys = (
        "agreement_t0",
        "length_t0_gamma3",
        "length_t0_gamma5",
        "one_minus_tv_t1",
        "length_t1_gamma3",
        "length_t1_gamma5",
    )
    return "\n".join(f"| {c} | " + " | ".join(f"{row[k]:.2f}" for k in keys) + " |" for c, row in found.items())


def sample_blocks(samples: list[dict[str, str]]) -> str:
    """Prompts and outputs, as they are."""
    parts = []
    for s in samples:
        prompt, output = (x.replace("```", "'''") for x in (s["prompt"], s["output"]))
        parts.append(f"Prompt:\n```text\n{prompt}\n```\nOutput:\n```text\n{output}\n```")
    return "\n\n".join(parts)


def card(work: Path, bundled: Path) -> str:
    """The whole card."""
    mix, manifest, check = (load(work / "data" / n) for n in ("mix.json", "manifest.json", "suite_check.json"))
    target, ngram, acceptance = (load(work / n) for n in ("target.json", "ngram.json", "acceptance.json"))
    run, distilled = progress(work / "target" / "checkpoint.pt"), last_line(work / "draft" / "loss.jsonl")
    refined = last_line(work / "refined" / "loss.jsonl")
    values = {
        "refine_rows": f"{sum(len(np.load(p, mmap_mode='r')) for p in work.glob('samples_final*.npy')):,}",
        "refine_tokens": f"{refined['tokens']:,}",
        "refine_kl": figures(refined["kl"]),
        "packages": packages(),
        "train_mb": f"{manifest['train']['bytes'] / 1e6:.0f}",
        "heldout_mb": f"{manifest['heldout_packages']['bytes'] / 1e6:.1f}",
        "mix": ", ".join(f"{k} {100 * v:.0f} %" for k, v in sorted(mix["token_share"].items(), key=lambda x: -x[1])),
        "stream_tokens": f"{mix['tokens']:,}",
        "tokens": f"{run['tokens']:,}",
        "epochs": f"{run['tokens'] / mix['tokens']:.2f}",
        "minutes": f"{run['elapsed_s'] / 60:.0f}",
        "losses": loss_table(work / "target" / "loss.jsonl", "loss"),
        "target_parameters": f"{parameters(bundled / 'target') / 1e6:.1f}",
        "draft_parameters": f"{parameters(bundled / 'draft') / 1e6:.2f}",
        "draft_tokens": f"{distilled['tokens'] + refined['tokens']:,}",
        "draft_minutes": f"{(distilled['elapsed_s'] + refined['elapsed_s']) / 60:.0f}",
        "draft_losses": loss_table(work / "draft" / "loss.jsonl", "kl", rows=6),
        "sample_rows": f"{len(np.load(work / 'samples.npy', mmap_mode='r')):,}",
        "bits": bits_table(target, ngram),
        "ngram_tokens": f"{ngram['tokens_counted']:,}",
        "positions": ", ".join(f"{k}: {v:.2f}" for k, v in target.get("nats_by_position", {}).items()),
        "acceptance": acceptance_table(acceptance),
        "check": json.dumps(check, indent=1),
        "samples": sample_blocks(target["samples"]),
    }
    text = (HERE / "card.md").read_text()
    for key, value in values.items():
        text = text.replace("{{" + key + "}}", value)
    return text


SHORT = """---
license: apache-2.0
library_name: transformers
---
# foretell bundled {name}

{what} Data, losses, bits per byte, acceptance by category, weaknesses and how to rebuild it: `README.md` one folder up.
Licence: Apache-2.0.
"""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="the folder W of README.md")
    parser.add_argument("--bundled", type=Path, default=Path("src/foretell/bundled"))
    args = parser.parse_args()
    (args.bundled / "README.md").write_text(card(args.work, args.bundled))
    for name, what in (
        (
            "target",
            "A {n:.1f}M-parameter Qwen3-type language model of Python code, documentation and small worked problems.",
        ),
        (
            "draft",
            "A {n:.2f}M-parameter Qwen3-type draft for speculative decoding of the bundled target, distilled from it.",
        ),
    ):
        folder = args.bundled / name
        text = SHORT.format(name=name, what=what.format(n=parameters(folder) / 1e6))
        (folder / "README.md").write_text(text)


if __name__ == "__main__":
    main()
