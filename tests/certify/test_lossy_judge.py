"""A certificate of the judge: windows are checked like any rule, texts are named lossy, a missing head is told first."""

from pathlib import Path

import pytest
import torch

from foretell import ConfigError, Engine, ModelError
from foretell.certify import certify
from foretell.certify.report import LOSSY
from foretell.heads import formats
from foretell.methods.draft_model.drafter import DraftModel
from foretell.methods.judge.head import JudgeHeadConfig, JudgeWeights
from tests.certify import harness as h


def engine(directory: Path) -> Engine:
    config = {"method": "draft_model", "num_speculative_tokens": 3, "judge": str(directory)}
    return Engine(h.TARGET, speculative=config, method=DraftModel(h.DRAFT))


def test_the_judge_is_certified_as_lossy(tmp_path: Path) -> None:
    spec = h.TARGET.spec
    head = JudgeWeights(JudgeHeadConfig(spec.hidden_size, spec.vocab_size, spec.num_layers - 1, spec.hidden_size))
    with torch.no_grad():
        head.bias.fill_(1.0)
    formats.save(head, tmp_path)
    found = h.certificate(engine(tmp_path), verifiers=["judge", "judge/threshold=1"], temperatures=(0.0, 1.0))
    assert not found.defects, found.defects
    tokens = {made.verifier: made for made in found.checks if made.name == "tokens"}
    assert tokens["judge"].verdict == LOSSY
    assert tokens["judge"].figures["texts_parted"] > 0
    assert tokens["judge/threshold=1"].figures["texts_parted"] == 0


def test_a_missing_head_is_told_before_anything_is_decoded(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises((ModelError, ConfigError), match="does not exist"):
        certify(
            engine(tmp_path / "none"),
            h.PROMPTS,
            verifiers=["judge"],
            progress=lambda done, total, what: said.append(what),
        )
    assert not said
