"""The same tokens with and without speculation: for rules whose text depends on nothing but target and seed.

At the first difference the two tokens are compared where they part: in float32, by the unmodified model, by the score
that decided (log p / E under coupled noise, the logit at temperature 0), and with every pass at one width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foretell.certify.plain import ROUNDING, RoundingJudge, after, distribution_of, unfiltered
from foretell.certify.recorder import Text
from foretell.certify.report import DEFECT, NEAR_TIE, Check, Finding, Tally
from foretell.core.noise import Noise, derive_seed, exponentials
from foretell.engine.engine import Engine, Request
from foretell.engine.request.result import Completion
from foretell.verify.base import Verifier


def follows_noise(verifier: Verifier) -> bool:
    """Whether sampled text is to be the plain text: the noise of plain decoding decides. A lossy rule that reads this
    noise parts from the plain text where it errs, so comparing texts measures how often."""
    return "noise" in verifier.reads and (verifier.invariant or not verifier.exact)


@dataclass(frozen=True)
class ObservedRun:
    """One request with and without speculation."""

    request: Request
    prompt_ids: list[int]
    plain: Completion
    found: Completion


def check_tokens(
    runs: Sequence[ObservedRun],
    engine: Engine,
    judge: RoundingJudge,
    verifier: Verifier,
    shape: str,
) -> Check:
    """Compare all texts. engine is the speculative one, not watched: it decodes again where texts part."""
    tally, num_tokens, num_parted, tie = Tally(), 0, 0, ROUNDING[engine.model.spec.dtype]
    for run in runs:
        expected, found = run.plain.token_ids, run.found.token_ids
        num_tokens += len(expected)
        if expected == found:
            continue
        num_parted += 1
        if not verifier.exact:
            continue
        finding = difference(run, engine, judge)
        tally.findings.append(finding)
        tally.add(finding.figures["gap"], tie, finding.where)
    tally.count, tally.tolerance = num_tokens, tie
    temperatures = sorted({run.request.params.temperature for run in runs})
    told = {"texts": len(runs), "texts_parted": num_parted, "temperatures": temperatures, "known": verifier.distance}
    measure = "largest gap between two tokens where texts part, in float32"
    return tally.check("tokens", engine.speculative.verify, shape, "tokens", measure, told, exact=verifier.exact)


def difference(run: ObservedRun, engine: Engine, judge: RoundingJudge) -> Finding:
    """What happened at the first token that differs."""
    expected, found = run.plain.token_ids, run.found.token_ids
    common = min(len(expected), len(found))
    at = next((k for k in range(common) if expected[k] != found[k]), common)
    params = run.request.params
    where = f"prompt of {len(run.prompt_ids)} tokens, output token {at}, temperature {params.temperature:g}"
    figures: dict[str, Any] = {"seed": params.seed, "position": at}
    if at == common:
        words = "one text is the beginning of the other: no rounding explains that"
        return Finding(DEFECT, where, words, {**figures, "gap": math.inf})
    a, b = expected[at], found[at]
    ids = [*run.prompt_ids, *expected[:at]]
    text = Text(ids, len(run.prompt_ids), params)
    gap, edge = gaps(text, judge, a, b)
    same = equal_at_width(run, engine)
    figures |= {"expected": a, "found": b, "gap": gap, "edge_tie": edge, "equal_at_width": same}
    tie = ROUNDING[engine.model.spec.dtype]
    near = edge or gap <= tie or (gap <= 20 * tie and same)
    words = f"token {b} instead of {a}; gap in float32 {gap:.2e}" + (", at the edge of a filter" if edge else "")
    words += f"; at one width the texts {'agree' if same else 'part too'}"
    return Finding(NEAR_TIE if near else DEFECT, where, words, figures)


def gaps(text: Text, judge: RoundingJudge, a: int, b: int) -> tuple[float, bool]:
    """(gap of the scores of tokens a and b after a text in float32, whether a filter's edge lies within rounding)."""
    params, model = text.params, judge.replay
    logits = after(model, text.ids).double()
    if params.temperature == 0:
        level = distribution_of(logits, unfiltered(text), text.ids, model).log()
        return abs(float(level[a] - level[b])), False
    assert params.seed is not None
    noise = Noise(torch.tensor([derive_seed(params.seed)]), torch.tensor([len(text.ids) - 1]))
    waits = exponentials(noise.coupled_keys(1)[0, 0], model.spec.vocab_size).double().to(logits.device)
    probs = distribution_of(logits, text, text.ids, model)
    score = (probs / waits).log()
    if min(float(probs[a]), float(probs[b])) > 0:
        return abs(float(score[a] - score[b])), False
    # One of the two cannot be drawn in float32: would it be, were the logits moved by no more than rounding?
    other = probs.clone()
    lone = a if float(probs[b]) > 0 else b
    other[lone] = 1.0 if float(probs[lone]) == 0 else 0.0
    winners = {int((moved / waits).argmax()) for moved in [probs, *judge.nearby(logits, text, text.ids, other, probs)]}
    return math.inf, {a, b} <= winners


def equal_at_width(run: ObservedRun, engine: Engine) -> bool:
    """Whether both texts agree when every pass of either, plain ones too, has as many nodes as the widest."""
    width = max(engine.width, engine.speculative.max_nodes)
    plain, found = (
        Engine(engine.model, engine.tokenizer, **kind, width=width, drafter_errors="raise")
        .generate(run.prompt_ids, run.request.params)
        .token_ids
        for kind in ({"speculative": "none"}, {"speculative": engine.speculative, "method": engine.method})
    )
    return found == plain
