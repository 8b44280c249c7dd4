"""Write a run's checkpoint as a Hugging Face directory, in bfloat16, while the run goes on or after it ended."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from recipes.models import SIZES, build, save


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=Path, required=True, help="folder with checkpoint.pt")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--size", choices=sorted(SIZES), default="7m")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = build(args.size)
    model.load_state_dict(torch.load(args.run / "checkpoint.pt", map_location="cpu", weights_only=True)["model"])
    save(model, args.tokenizer, args.out)


if __name__ == "__main__":
    main()
