"""Floor 1: verification rules. Pure functions from evidence to laws; no models, no state, no generators."""

from foretoken.spec import parse_spec
from foretoken.verify.exact import Coupled, Exact
from foretoken.verify.law import Evidence, Verdict, Verifier, Walk, draw
from foretoken.verify.rejection import Rejection

VERIFIERS: dict[str, Verifier] = {verifier.name: verifier for verifier in (Coupled(), Exact(), Rejection())}
"""Names, as the CLI and JSON configurations spell them, to verifiers with their default options."""


def parse_verifier(text: str) -> Verifier:
    """The verifier of ``name[/option=value]...``, e.g. "coupled" or "typical/epsilon=0.1". Raises ConfigError."""
    return parse_spec(text, VERIFIERS, "verifier")


__all__ = [
    "VERIFIERS",
    "Coupled",
    "Evidence",
    "Exact",
    "Rejection",
    "Verdict",
    "Verifier",
    "Walk",
    "draw",
    "parse_verifier",
]
