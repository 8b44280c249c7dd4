"""Floor 1: verifiers. Pure functions from evidence to probabilities; no models, no state, no generators."""

from typing import Any

from foretell.core import builtin
from foretell.core.registry import Registry, part_of
from foretell.core.spec import parse_spec
from foretell.verify.base import Evidence as Evidence, Verdict as Verdict, Verifier as Verifier, Walk as Walk
from foretell.verify.block import Block as Block
from foretell.verify.drawing import draw as draw
from foretell.verify.exact import Coupled as Coupled, Exact as Exact
from foretell.verify.greedy_block import GreedyBlock as GreedyBlock
from foretell.verify.lossy.base import TopN as TopN, Typical as Typical
from foretell.verify.lossy.judge import Judge as Judge, JudgeHead as JudgeHead
from foretell.verify.multidraft import KSeq as KSeq
from foretell.verify.rejection import Rejection as Rejection
from foretell.verify.selection import Importance as Importance, Transport as Transport
from foretell.verify.traversal import Traversal as Traversal


def _verifier(name: str, found: Any) -> Verifier:
    return part_of(name, found, Verifier, ("exact", "draws", "summary"))  # type: ignore[type-abstract]


VERIFIERS: Registry[Verifier] = Registry("verifier", builtin.VERIFIERS, "foretell.verifiers", _verifier)
"""Names, as the CLI and JSON configurations spell them, to verifiers with their default options. Those of packages come
from entry points of the group "foretell.verifiers": a class that is a frozen dataclass and a Verifier."""


def parse_verifier(text: str) -> Verifier:
    """The verifier of ``name[/option=value]...``, e.g. "coupled" or "typical/epsilon=0.1". Raises ConfigError."""
    return parse_spec(text, VERIFIERS, "verifier")
