"""What a process imports until its first token: not what the native implementation has no use for."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import checkpoint

HEAVY = ("transformers", "huggingface_hub", "accelerate", "scipy", "sympy", "torch._dynamo", "torch._inductor")
GENERATE = f"""
import sys
import foretell
assert "torch" not in sys.modules and "numpy" not in sys.modules, "import foretell alone"
engine = foretell.Engine.load(sys.argv[1], implementation=sys.argv[2], speculative=sys.argv[3])
messages = [{{"role": "user", "content": "the class"}}]
assert engine.generate("the class", max_new_tokens=4).token_ids
assert engine.chat_prompt(messages)
print(engine.model.spec.implementation, [name for name in {HEAVY!r} if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("implementation", "method", "told"),
    [
        ("native", "draft_model", "native []"),
        pytest.param("native", "eagle3", "native []", marks=pytest.mark.slow),
        pytest.param("native", "dflash", "native []", marks=pytest.mark.slow),
        pytest.param("lean", "none", "lean []", marks=pytest.mark.slow),
        pytest.param("transformers", "none", "transformers ['transformers'", marks=pytest.mark.slow),  # the control
    ],
)
def test_a_first_token(tmp_path: Path, implementation: str, method: str, told: str) -> None:
    target = "bundled" if implementation == "native" else str(checkpoint.save(tmp_path))
    command = [sys.executable, "-c", GENERATE, target, implementation, method]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(told)


def test_methods_are_listed_without_transformers() -> None:
    """A server lists them when it starts, and waited for transformers for 36 seconds on a busy machine."""
    told = f"print([name for name in {HEAVY!r} if name in sys.modules])"
    code = f"import sys; from foretell.engine.config import METHODS; dict(METHODS); {told}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "[]\n"
