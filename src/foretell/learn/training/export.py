"""What was learned as a checkpoint: a directory that ``--draft`` and ``--method`` load, as ``foretell train`` writes."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretell.heads import formats
from foretell.heads.head import Head
from foretell.learn.training.student import Student
from foretell.model.load import load_tokenizer


def export(student: Student, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write a version's weights whole or not at all: beside the folder first, then in its place. Raises OSError."""
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        # Half of the bytes and the same guesses: what serves has 4 or 8 bits.
        made: Any = student.module(weights).to(torch.bfloat16)
        if isinstance(made, Head):
            formats.save(made, part, target=student.origin.target, target_name=student.origin.target.name)
        else:
            made.save_pretrained(str(part))
            load_tokenizer(student.origin.init).save_pretrained(str(part))
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        try:
            part.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
