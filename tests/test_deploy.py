"""Images and examples of docs/deploy.md: what they name is there, and nothing is stopped before it has drained."""

import inspect
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from foretell.cli.app import app
from foretell.cli.commands.serve import serve
from foretell.server.security import PROBES

ROOT = Path(__file__).parents[1]
IMAGES = ("Dockerfile", "Dockerfile.cuda")
DRAIN_S = inspect.signature(serve).parameters["drain_timeout"].default
ENDING_S = 5.0
"""Of ``config_of``, after the drain."""


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def stages(name: str) -> list[list[tuple[str, str]]]:
    """(instruction, argument) of each stage of an image; what stands before the first is left out."""
    lines = [line for line in read(name).splitlines() if not line.startswith("#")]
    found: list[list[tuple[str, str]]] = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            found.append([])
        if word and found:
            found[-1].append((word, rest.strip()))
    return found


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(read(name)))


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = next(one for one in documents("deploy/kubernetes.yaml") if one["kind"] == "Deployment")[
        "spec"
    ]
    return spec["template"]["spec"]


def unit() -> dict[str, list[str]]:
    """The keys of the service; one may stand there several times."""
    found: dict[str, list[str]] = {}
    for line in read("deploy/foretell.service").splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def commands() -> Iterator[tuple[str, list[str]]]:
    """(where, arguments of foretell) of all images, examples and the page."""
    for name in IMAGES:
        last = dict(stages(name)[-1])
        assert yaml.safe_load(last["ENTRYPOINT"]) == ["foretell"]
        yield name, yaml.safe_load(last["CMD"])
    for service in documents("deploy/compose.yaml")[0]["services"].values():
        yield "compose.yaml", service["command"]
    for container in (*pod()["initContainers"], *pod()["containers"]):
        yield "kubernetes.yaml", container["args"]
    for line in (*unit()["ExecStartPre"], *unit()["ExecStart"]):
        program, *words = shlex.split(line)
        assert program == "/opt/foretell/bin/foretell"
        yield "foretell.service", words
    for words in re.findall(r"^docker run .* foretell(?::cuda)? (.*)$", read("docs/deploy.md"), flags=re.MULTILINE):
        yield "deploy.md", shlex.split(words)


def test_options_are_the_commands_own() -> None:
    root: Any = typer.main.get_command(app)
    found = list(commands())
    assert len(found) >= 9
    for where, (name, *words) in found:
        known = {option for one in root.commands[name].params for option in one.opts}
        for word in words:
            assert not word.startswith("--") or word in known, f"{where}: {name} {word}"


def test_variables_are_read_somewhere() -> None:
    texts = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py"))
    files = (*IMAGES, "docs/deploy.md", *(f"deploy/{name}" for name in os.listdir(ROOT / "deploy")))
    named = {name for file in files for name in re.findall(r"\bFORETELL_[A-Z_]+\b", read(file))}
    assert named >= {"FORETELL_API_KEY", "FORETELL_CACHE", "FORETELL_MODELS"}
    assert {name for name in named if f'"{name}"' not in texts} - {"FORETELL_PREBUILD"} == set()
    assert "FORETELL_PREBUILD" in read("setup.py")


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_copies_what_is_there_and_is_not_left_out(name: str) -> None:
    left = [line for line in read(".dockerignore").splitlines() if line and not line.startswith("#")]
    assert left[0] == "*"
    for word, rest in (each for stage in stages(name) for each in stage):
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in left, source
    assert not {f"!{name}" for name in (".git", ".venv", "build", "tests")} & set(left)


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_runs_as_nobody_special_with_one_volume_and_a_check(name: str) -> None:
    last = stages(name)[-1]
    words = dict(last)
    assert int(words["USER"]) > 0
    assert [word for word, _ in last].index("USER") > [word for word, _ in last].index("RUN")
    places = re.findall(r"(?:FORETELL_CACHE|FORETELL_MODELS|HF_HOME|TRITON_CACHE_DIR)=(\S+)", words["ENV"])
    assert len(places) >= 3
    assert all(place.startswith(words["VOLUME"]) for place in places)
    (path,) = re.findall(rf"127\.0\.0\.1:{words['EXPOSE']}(/\w+)", words["HEALTHCHECK"])
    assert path in PROBES


def test_the_image_for_cpus_has_kernels_and_no_compiler() -> None:
    built, last = (" ".join(rest for _, rest in stage) for stage in stages("Dockerfile"))
    assert "FORETELL_PREBUILD=1" in built
    assert "gcc" in built
    assert "gcc" not in last
    assert "apt-get" not in last
    assert "PATH=/opt/foretell/bin foretell" in built, "that no compiler is needed is seen while it is built"
    assert all(f"torch/{folder}" in built for folder in ("test", "include"))


def test_the_image_is_built_every_week() -> None:
    steps = [step.get("run", "") for step in documents(".github/workflows/weekly.yml")[0]["jobs"]["image"]["steps"]]
    assert "docker build -t foretell ." in steps
    (run,) = (shlex.split(step) for step in steps if step.startswith("docker run"))
    assert run[:4] == ["docker", "run", "--rm", "foretell"]
    assert any("docker image inspect" in step for step in steps)


def test_nothing_is_stopped_before_it_has_drained() -> None:
    """The server takes its drain, and then so long to tell the rest of their end."""
    compose, one = documents("deploy/compose.yaml")[0]["services"]["foretell"], pod()
    ahead = one["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    waits = {
        "compose.yaml": float(compose["stop_grace_period"].removesuffix("s")),
        "kubernetes.yaml": one["terminationGracePeriodSeconds"] - ahead,
        "foretell.service": float(unit()["TimeoutStopSec"][0]),
    }
    drains = {
        where: float(words[words.index("--drain-timeout") + 1])
        for where, words in commands()
        if "--drain-timeout" in words
    }
    assert drains.keys() == waits.keys()
    for where, drain in drains.items():
        assert waits[where] > max(drain, DRAIN_S) + ENDING_S, where


def test_probes_ask_what_they_are_for() -> None:
    container = pod()["containers"][0]
    (port,) = container["ports"]
    paths = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {name: found["path"] for name, found in paths.items()} == {
        "startup": "/ready", "readiness": "/ready", "liveness": "/health",
    }  # fmt: skip
    assert {found["port"] for found in paths.values()} == {port["name"]}
    assert {found["path"] for found in paths.values()} <= PROBES
    assert container["args"][container["args"].index("--port") + 1] == str(port["containerPort"])
    check = documents("deploy/compose.yaml")[0]["services"]["foretell"]["healthcheck"]["test"][-1]
    assert re.findall(r":8000(/\w+)", check)[0] in PROBES


def test_threads_are_as_many_as_the_cores_of_the_limit() -> None:
    compose, container = documents("deploy/compose.yaml")[0]["services"]["foretell"], pod()["containers"][0]
    threads = {one["name"]: one.get("value") for one in container["env"]}["OMP_NUM_THREADS"]
    assert container["resources"]["limits"]["cpu"] == threads
    assert compose["environment"]["OMP_NUM_THREADS"] == str(compose["cpus"])
    assert f"{int(unit()['CPUQuota'][0].removesuffix('%')) // 100}" in re.findall(
        r"OMP_NUM_THREADS=(\d+)", read("deploy/foretell.service")
    )


def test_every_example_is_on_the_page() -> None:
    assert {f"../deploy/{name}" for name in os.listdir(ROOT / "deploy")} == set(
        re.findall(r"\((\.\./deploy/[^)]+)\)", read("docs/deploy.md"))
    )
