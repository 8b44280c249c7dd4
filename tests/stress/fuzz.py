"""Schemathesis over /openapi.json: no 5xx, and every answer must match the document.

    python -m tests.stress.fuzz [--minutes 5] [--url http://127.0.0.1:8000]

Valid requests are left valid but made short, and ask for the model that is served: see ``before_call``. A valid request
may still be refused (a prompt beyond the context), so that check alone is left out.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.stress.served import Check, add_options, report, served

MODEL_VARIABLE = "FORETELL_FUZZ_MODEL"
ROOT = Path(__file__).resolve().parents[2]
CAPS = {"max_tokens": 8, "max_completion_tokens": 8, "max_output_tokens": 8, "n": 3, "best_of": 3, "min_tokens": 4}
READ_ONLY = ("/tokenize", "/v1/embeddings", "/api/embed", "/api/embeddings")
"""They take texts, and no limit of an answer."""
LEFT_OUT = "positive_data_acceptance"
HANGS_S = 900  # the server ends a request that takes longer than 600 s itself


def shorten(body: Any, model: str, path: str = "") -> Any:
    """A body that is as valid, or as invalid, as it was; a valid one is quick and names the model that is served."""
    if not isinstance(body, dict):
        return body
    out = dict(body)
    if isinstance(out.get("model"), str) and len(out["model"]) <= 512:
        out["model"] = model
    for name, most in CAPS.items():
        given = out.get(name)
        whole = type(given) is int or (type(given) is float and given.is_integer())  # JSON Schema: 1e3 is an integer
        if whole and most < given < 2**31:
            out[name] = most
    # Null means no limit: with ignore_eos a whole context, and most of the minutes that the fuzz has.
    names = ("max_output_tokens",) if "input" in out else ("max_tokens", "max_completion_tokens")
    asks = path not in READ_ONLY and any(name in out for name in ("model", "input", "messages", "prompt"))
    if asks and all(out.get(name) is None for name in names):
        out[names[0]] = CAPS[names[0]]
    return out


if MODEL_VARIABLE in os.environ:  # schemathesis has imported this file for its hooks
    import schemathesis

    @schemathesis.hook
    def before_call(context: Any, case: Any, kwargs: Any) -> None:
        case.body = shorten(case.body, os.environ[MODEL_VARIABLE], case.operation.path)


def run_schemathesis(url: str, model: str, minutes: float, seed: int) -> dict[str, Any]:
    """Its JSON report, with what it printed under "printed". ``minutes`` sets how many requests are made, not how long they
    may take: nothing here fails because a machine is slow, or stops for a while."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        # Coverage alone takes minutes for the larger bodies: a short run has a few requests of every operation instead.
        phases = "examples,fuzzing" if minutes < 2 else "examples,coverage,fuzzing"
        program = str(Path(sys.executable).with_name("schemathesis"))
        command = [
            program, "run", f"{url}/openapi.json", "--seed", str(seed), "--checks", "all",
            "--exclude-checks", LEFT_OUT, "--phases", phases, "--max-examples", str(max(12, round(30 * minutes))),
            "--exclude-path-regex", "^/debug", "--continue-on-failure", "--suppress-health-check", "all",
            "--request-timeout", str(HANGS_S), "--no-color", "--generation-database", "none",
            "--report", "json", "--report-json-path", str(file),
        ]  # fmt: skip
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        settings = {"SCHEMATHESIS_HOOKS": "tests.stress.fuzz", MODEL_VARIABLE: model, "PYTHONPATH": paths}
        done = subprocess.run(command, cwd=folder, env=os.environ | settings, capture_output=True, text=True)
        if not file.exists():
            raise SystemExit(f"schemathesis made no report (exit status {done.returncode}):\n{done.stderr[-2000:]}")
        return {**json.loads(file.read_text(encoding="utf-8")), "printed": done.stdout}


def fuzz(args: argparse.Namespace) -> int:
    with served(args) as server:
        found = run_schemathesis(server.url, server.model(), args.minutes, args.seed)
        left = asyncio.run(server.idle()) if server.is_up() else "it is down"
    kinds = [
        Check(f"{kind['code']} {kind['title']}", False, f"{kind['count']}: {', '.join(kind['operations'])}")
        for kind in found["failures"]
    ]
    operations, cases = found["operations"], found["test_cases"]
    ran = cases["generated"] > 0 and operations["tested"] == operations["selected"] and not operations["errored"]
    served_none = [
        name
        for name, rates in found["valid_rates"].items()
        # A server that was started without --learn has no learner to ask, and the bundled model fills no gaps.
        if not sum(r["accepted"] for r in rates.values()) and not name.endswith(("/learner", "/infill"))
    ]
    checks = [
        Check(
            "valid requests are served",
            not served_none,
            f"none of {', '.join(served_none)}" if served_none else "some of each",
        ),
        Check("operations", ran, f"{operations['tested']} of {operations['selected']}, {cases['generated']} requests"),
        Check("schemathesis itself", not found["errors"], f"{len(found['errors'])} errors"),
        Check("matches the document", not kinds, f"{cases['unique_failures']} ways that it is not"),
        *kinds,
        Check("nothing left", left is None, left or "the server is up and idle"),
    ]
    if kinds or found["errors"]:
        print(found["printed"])
    return report(checks, {"test_cases": cases, "seconds": found["running_time"], "seed": args.seed})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--minutes", type=float, default=5.0, help="about so much work, on an idle machine")
    parser.add_argument("--seed", type=int, default=1)
    return fuzz(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
