"""Checkpoints on disk, made once; commands run in this process."""

import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from tests.cli import checkpoint

Invoke = Callable[..., Result]
made = cache(typer.main.get_command)
"""Typer builds all options of all commands anew for every run, which takes longer than most runs of a test."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of tiny models."""
    root = tmp_path_factory.mktemp("models")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = {
            "target": checkpoint.save(root / "target"),
            "draft": checkpoint.save(root / "draft", noise=0.03),
            "stranger": checkpoint.save(root / "stranger", reverse=True),
            "short": checkpoint.save(root / "short", context=32),
            "plain": checkpoint.save(root / "plain", chat=False),
        }
    truncated = checkpoint.copy(saved["target"], root / "truncated")
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    absent = checkpoint.copy(saved["target"], root / "absent")
    (absent / "model.safetensors").unlink()
    return {**saved, "truncated": truncated, "absent": absent}


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run a command in this process. Whatever went wrong was said in one line, never as a traceback."""
    kept = ("FORETELL_MODELS", "FORETELL_OFFLINE")  # of the whole suite
    for name in [name for name in os.environ if name.startswith("FORETELL_") and name not in kept]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("typer.testing._get_command", made)

    def run(*args: object, input: str | bytes | None = None, env: dict[str, str] | None = None) -> Result:
        from foretell.cli.app import app

        with warnings.catch_warnings():
            result = CliRunner().invoke(app, [str(arg) for arg in args], input=input, env=env)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert "Traceback" not in result.output
        return result

    return run


@pytest.fixture
def generate(invoke: Invoke, models: dict[str, Path]) -> Invoke:
    """``foretell generate`` with the tiny target, in the plain implementation that needs no compiler."""

    def run(*args: object, input: str | bytes | None = None, env: dict[str, str] | None = None) -> Result:
        options = ["--target", models["target"], "--implementation", "lean"]
        return invoke("generate", *options, *args, input=input, env=env)

    return run
