"""The requests of a certificate: temperatures, processors, seeds."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foretell.certify.plain import RoundingJudge, Tolerance, distribution_of, plain_logits
from foretell.certify.recorder import Visit
from foretell.certify.report import DEFECT, NEAR_TIE, Check, Finding, few, verdict_of
from foretell.core.noise import derive_seed
from foretell.core.params import MAX_SEED, SamplingParams
from foretell.engine.engine import Prompt, Request
from foretell.model.target import CausalModel


def unquiet(ids: Tensor, logits: Tensor) -> Tensor:
    """A user's processor that reads prefix and path: it lowers the last token, and raises the one whose id is their sum
    modulo V."""
    out = logits.clone()
    out[ids[-1]] -= 3.0
    out[int(ids.sum()) % len(out)] += 2.0
    return out


def conditions(temperature: float, max_new_tokens: int) -> list[SamplingParams]:
    """One of each kind: no processor, penalties, filters, rules. Prompts take them in turn."""
    base = {"temperature": temperature, "max_new_tokens": max_new_tokens}
    return [
        SamplingParams(**base),  # type: ignore[arg-type]
        SamplingParams(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, **base),  # type: ignore[arg-type]
        SamplingParams(top_p=0.9, top_k=50, min_p=0.01, **base),  # type: ignore[arg-type]
        SamplingParams(min_new_tokens=max_new_tokens // 2, logits_processor=unquiet, **base),  # type: ignore[arg-type]
    ]


NAMES = ("plain", "penalties", "filters", "rules")


def requests(prompts: Sequence[Prompt], temperature: float, max_new_tokens: int, seed: int) -> list[Request]:
    """A request a prompt, each with a seed of its own: with equal seeds draws would not be independent."""
    kinds = conditions(temperature, max_new_tokens)
    return [
        Request(prompt, replace(kinds[index % len(kinds)], seed=request_seed(seed, temperature, index)))
        for index, prompt in enumerate(prompts)
    ]


def request_seed(seed: int, temperature: float, index: int) -> int:
    """A seed in [0, ``MAX_SEED``] that no other prompt or temperature has."""
    return derive_seed(seed, int(temperature * 1_000_000), index) & MAX_SEED


HEAVY = 0.01
"""Log probabilities are compared for tokens at least as probable: below it the absolute difference says more."""


def deviations(observed: Tensor, plain: Tensor) -> tuple[float, float]:
    """(largest difference of a probability, of the log probability of a heavy token); infinite where just one is no
    distribution."""
    fine, known = bool(torch.isfinite(observed).all()), bool(torch.isfinite(plain).all())
    if not (fine and known):
        return (0.0, 0.0) if fine == known else (math.inf, math.inf)
    observed, plain = observed.double(), plain.double()
    heavy = (plain >= HEAVY) & (observed > 0)
    logs = (observed[heavy].log() - plain[heavy].log()).abs()
    return float((observed - plain).abs().max()), float(logs.max()) if len(logs) else 0.0


def check_window(
    model: CausalModel, visits: Sequence[Visit], judge: RoundingJudge, verifier: str, shape: str, width: int
) -> Check:
    """Compare every node of every visit."""
    findings: list[Finding] = []
    worst, worst_log, worst_share, where, tolerance, num_contexts, num_off_path = 0.0, 0.0, -1.0, "", 0.0, 0, 0
    for visit, node, logits in plain_logits(model, visits, width):
        allowed = Tolerance.of(model.spec.dtype, visit.text.params)
        gap, log = deviations(visit.p[node], distribution_of(logits, visit.text, visit.context(node), model))
        num_contexts += 1
        num_off_path += node > 0
        share = max(gap / allowed.probability, log / allowed.log)
        here = (
            f"prompt of {visit.text.num_prompt} tokens, output position {visit.text.num_output}, "
            f"node {node} (path {visit.tokens[visit.path(node)].tolist()}), temperature {visit.text.params.temperature:g}"
        )
        if share > 1:
            explained, words = judge.explain(visit, node, visit.p[node], logits)
            figures = {"probability": gap, "log": log, "seed": visit.text.params.seed, "node": node}
            findings.append(Finding(NEAR_TIE if explained else DEFECT, here, words, figures))
            if explained:
                continue
        if share > worst_share:
            worst_share, where, tolerance = share, here, allowed.probability
        worst, worst_log = max(worst, gap), max(worst_log, log)
    return Check(
        "window", verifier, shape, verdict_of(findings, num_off_path), num_contexts, "nodes",
        worst if num_contexts else None, tolerance if num_contexts else None,
        "largest difference of a probability, near-ties apart", where, few(findings),
        {"largest_log": worst_log, "guessed_nodes": num_off_path, "visits": len(visits),
         "near_ties": sum(finding.verdict == NEAR_TIE for finding in findings)},
    )  # fmt: skip
