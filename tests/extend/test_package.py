"""docs/extend.md and the package that it shows: the same files, installed by pip in a fresh environment, used by name."""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import foretell
from tests.extend.packages import THIRD_PARTY
from tests.readme import DOCUMENTS, ROOT, blocks, files

DOCUMENT = "docs/extend.md"
COMMANDS = """
import json
from typer.testing import CliRunner
from foretell.cli.app import app
for command in (
    "methods --json",
    "bench --methods echo:3:direct --limit 1 --max-new-tokens 8 --threads 1 --json",
    "certify --method echo --verify direct --shape chain --limit 1 --max-new-tokens 4 --threads 1 --json",
):
    done = CliRunner().invoke(app, command.split(), catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    print(json.dumps(done.stdout))
"""
"""In one process: each imports for seconds."""


def test_the_document_shows_the_package_that_is_tested() -> None:
    text = (ROOT / DOCUMENT).read_text(encoding="utf-8")
    shown = files(text)
    assert shown.keys() == {
        f"foretell-echo/{path.relative_to(THIRD_PARTY)}"
        for path in THIRD_PARTY.rglob("*")
        if path.suffix in (".py", ".toml")
    }
    for name, content in shown.items():
        assert content == (THIRD_PARTY / name.removeprefix("foretell-echo/")).read_text(encoding="utf-8"), name
    assert DOCUMENT in DOCUMENTS
    assert len(blocks(text)) == 2


@pytest.mark.parametrize(("name", "most"), [("drafter.py", 30), ("rule.py", 30), ("head.py", 90)])
def test_each_is_short(name: str, most: int) -> None:
    lines = (THIRD_PARTY / "foretell_echo" / name).read_text(encoding="utf-8").splitlines()
    assert sum(bool(line.strip()) for line in lines) <= most


def test_every_name_that_the_document_imports_is_public() -> None:
    for path in THIRD_PARTY.rglob("*.py"):
        for word in path.read_text(encoding="utf-8").split("foretell.")[1:]:
            name = word.split("(")[0].split(")")[0].split(".")[0].split()[0]
            assert not name[0].isupper() or name in foretell.__all__, name


@pytest.mark.slow
def test_installed_in_a_fresh_environment_it_is_listed_benched_and_certified(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    purelib = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    # torch is too large to be installed again: the new environment sees this one's packages behind its own.
    here = [path for path in sys.path if path.endswith("site-packages")]
    lines = [f"import site; site.addsitedir({path!r})" for path in here]
    Path(purelib, "shared.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    source = str(Path(foretell.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}

    def run(*command: str) -> str:
        done = subprocess.run(
            [python, *command], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    cli = ("-m", "foretell.cli.main")
    assert "echo" not in json.loads(run(*cli, "methods", "--json"))["methods"]
    shutil.copytree(THIRD_PARTY, tmp_path / "package")  # building leaves files behind
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    built = (*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", "wheels", "./package")
    subprocess.run(built, cwd=tmp_path, check=True, timeout=300)
    (wheel,) = (tmp_path / "wheels").iterdir()
    subprocess.run(
        (*pip, "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel), check=True, timeout=300
    )
    told = run("-c", COMMANDS).splitlines()
    found, report, certificate = map(json.loads, map(json.loads, told))
    assert found["methods"]["echo"]["package"] == found["verifiers"]["direct"]["package"] == "foretell-echo 1.2.0"
    assert found["not_used"] == []
    assert "echo:3:direct" in json.dumps(report)
    assert certificate["verdict"] == "certified"
