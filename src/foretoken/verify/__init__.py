"""Floor 1: verification rules. Pure functions from evidence to laws; no models, no state, no generators."""

from foretoken.spec import parse_spec
from foretoken.verify.block import Block
from foretoken.verify.divergence import Divergence
from foretoken.verify.exact import Coupled, Exact
from foretoken.verify.greedy_block import GreedyBlock
from foretoken.verify.gumbel_list import GumbelList
from foretoken.verify.judge import Judge, JudgeHead
from foretoken.verify.law import Evidence, Verdict, Verifier, Walk, draw
from foretoken.verify.lenience import Lenience
from foretoken.verify.lookahead import EntropyGated
from foretoken.verify.lossy import Threshold, TopN, Typical
from foretoken.verify.multidraft import KSeq
from foretoken.verify.rejection import Rejection
from foretoken.verify.selection import Importance, Transport
from foretoken.verify.traversal import Traversal

_MATCHING = (Coupled(), Exact(), GumbelList())
_READING_Q = (Rejection(), Block(), Traversal(), GreedyBlock(), KSeq(), Importance(), Transport())
_LOSSY = (Typical(), Threshold(), TopN(), Lenience(), EntropyGated(), Divergence(), Judge())
VERIFIERS: dict[str, Verifier] = {verifier.name: verifier for verifier in (*_MATCHING, *_READING_Q, *_LOSSY)}
"""Names, as the CLI and JSON configurations spell them, to verifiers with their default options."""


def parse_verifier(text: str) -> Verifier:
    """The verifier of ``name[/option=value]...``, e.g. "coupled" or "typical/epsilon=0.1". Raises ConfigError."""
    return parse_spec(text, VERIFIERS, "verifier")


__all__ = [
    "VERIFIERS",
    "Block",
    "Coupled",
    "Divergence",
    "EntropyGated",
    "Evidence",
    "Exact",
    "GreedyBlock",
    "GumbelList",
    "Importance",
    "Judge",
    "JudgeHead",
    "KSeq",
    "Lenience",
    "Rejection",
    "Threshold",
    "TopN",
    "Transport",
    "Traversal",
    "Typical",
    "Verdict",
    "Verifier",
    "Walk",
    "draw",
    "parse_verifier",
]
