"""Runs named tests against changed copies of the package, each in a forked child: imports are paid for once.

``python runner.py`` reads a JSON list of jobs from stdin, ``{"src": directory, "tests": [node ids], "timeout_s": 60}``,
with ``"environment": {name: value}`` where that differs, and writes one JSON line a job to stdout: pytest's exit code
(124 where the time was up first) and the end of what it printed. No job begins behind ``"until"``, in seconds of the
epoch, where that is given: what it would have found is null.
The package must not be imported before the fork: each child imports its own copy.
"""

import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from typing import Any

IMPORTED_BEFORE = (
    "torch", "numpy", "scipy.stats", "pytest", "pytest_timeout", "hypothesis", "hypothesis.strategies",
    "transformers", "transformers.generation", "transformers.modeling_utils", "transformers.tokenization_utils_tokenizers",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama", "accelerate", "safetensors.torch", "tokenizers", "gguf", "httpx", "jinja2",
    "typer.testing", "rich.table", "fastapi", "starlette.testclient", "sse_starlette", "structlog", "prometheus_client",
    "uvicorn", "llguidance", "openai",
)  # fmt: skip
"""What many tests import and no bug is planted in. One that is not there is left to the tests that need it."""
OPTIONS = ["-x", "-q", "-m", "", "-p", "no:cacheprovider", "--tb=short"]
OPTIONS += ["-p", "pytest_timeout"]  # of a setting in pyproject.toml, which pytest refuses where it is not known
OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # for what was imported before pytest began
OUTPUT_END = 4000  # characters


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One job in a child of this process."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            os.setsid()
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            _test(job["src"], job["tests"], job.get("environment", {}))
        code = _wait(child, time.monotonic() + job["timeout_s"])
        output.seek(0)
        return {"code": code, "output": output.read()[-OUTPUT_END:]}


def _wait(child: int, deadline: float) -> int:
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return 124
        time.sleep(0.01)


def _test(source: str, tests: list[str], environment: dict[str, str]) -> None:
    import pytest

    sys.path.insert(0, source)
    os.environ.update(environment, FORETELL_PLANTED_BUG="1")
    os.environ["PYTHONPATH"] = source + os.pathsep + os.environ.get("PYTHONPATH", "")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # none other is needed here, and some import for seconds
    for name in ("CI", "BUILD_NUMBER"):  # with them pytest works out whole differences: minutes, for two long lists
        os.environ.pop(name, None)
    code = 99
    try:
        code = int(pytest.main([*OPTIONS, *tests]))
        import foretell

        assert foretell.__file__ is not None
        if not foretell.__file__.startswith(source):
            print(f"tested {foretell.__file__}, not the copy in {source}")
            code = 98
    except pytest.PytestUnhandledThreadExceptionWarning:  # of a thread that outlived its test, and failed after it
        code = 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Jobs from stdin, results to stdout."""
    jobs = json.load(sys.stdin)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in IMPORTED_BEFORE:
            with suppress(ImportError):
                importlib.import_module(name)
    assert "foretell" not in sys.modules
    gc.collect()
    gc.freeze()  # no child looks through all of it again
    os.environ.pop("FORETELL_TESTS_UNTIL", None)  # a test that is skipped would let its bug escape
    for job in jobs:
        late = time.time() > job.get("until", float("inf"))
        print(json.dumps(None if late else run(job)), flush=True)


if __name__ == "__main__":
    main()
