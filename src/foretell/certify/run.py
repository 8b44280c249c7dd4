"""``certify``: decode with every verifier and shape under observation, then check what was recorded."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from foretell.certify.distribution import VisitedContext, check_distribution, contexts_of
from foretell.certify.draws import DrawChecks
from foretell.certify.joint import check_joint
from foretell.certify.noise import check_noise
from foretell.certify.plain import RoundingJudge, Tolerance, distribution_of, plain_logits
from foretell.certify.recorder import Visit, VisitRecorder, unwatched
from foretell.certify.report import (
    DEFECT,
    NEAR_TIE,
    Certificate,
    Check,
    Finding,
    Tally,
    unquantised_of,
    weights_distance,
)
from foretell.certify.tokens import ObservedRun, check_tokens, follows_noise
from foretell.core.errors import ConfigError, DrafterError, ForetellError, VerifierError
from foretell.core.noise import derive_seed
from foretell.core.params import MAX_SEED, SamplingParams
from foretell.draft.config import MethodConfig, parse_draws, refusal
from foretell.draft.shapes import parse_shape
from foretell.engine.engine import Engine, Prompt, Request
from foretell.engine.request.request import token_ids
from foretell.engine.request.result import Completion
from foretell.model.target import CausalModel
from foretell.verify import VERIFIERS, parse_verifier


def unquiet(ids: Tensor, logits: Tensor) -> Tensor:
    """A user's processor that reads prefix and path: it lowers the last token, and raises the one whose id is their sum
    modulo V."""
    out = logits.clone()
    out[ids[-1]] -= 3.0
    out[int(ids.sum()) % len(out)] += 2.0
    return out


CONDITIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "filters": {"top_p": 0.9, "top_k": 50, "min_p": 0.01},
    "rules": {"logits_processor": unquiet},
}
"""Settings of a request beside its temperature: prompts take them in turn."""


def requests(prompts: Sequence[Prompt], temperature: float, max_new_tokens: int, seed: int) -> list[Request]:
    """A request a prompt, each with a seed of its own: with equal seeds draws would not be independent."""
    names, made = list(CONDITIONS), []
    for index, prompt in enumerate(prompts):
        name = names[index % len(names)]
        least = max_new_tokens // 2 if name == "rules" else 0
        own = derive_seed(seed, int(temperature * 1_000_000), index) & MAX_SEED
        base = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, min_new_tokens=least, seed=own)
        made.append(Request(prompt, replace(base, **CONDITIONS[name])))
    return made


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
    """Compare every node of every visit.

    p at every node of a tree must be the distribution of plain decoding: processors, positions, cache slots, masks.
    The rows that production gave to its verifier are compared with a fresh cache, one node a pass, and processors
    that read only a history. Beyond the tolerance of the dtype a ``RoundingJudge`` separates rounding from defects.
    """
    tally, worst_log, num_off_path, num_near = Tally(), 0.0, 0, 0
    for visit, node, logits in plain_logits(model, visits, width):
        allowed = Tolerance.of(model.spec.dtype, visit.text.params)
        gap, log = deviations(visit.p[node], distribution_of(logits, visit.text, visit.context(node), model))
        num_off_path += node > 0
        share, here = max(gap / allowed.probability, log / allowed.log), visit.where(node)
        if share > 1:
            explained, words = judge.explain(visit, node, visit.p[node], logits)
            figures = {"probability": gap, "log": log, "seed": visit.text.params.seed, "node": node}
            tally.findings.append(Finding(NEAR_TIE if explained else DEFECT, here, words, figures))
            if explained:
                num_near += 1
                continue
        tally.add(gap, allowed.probability, here, share)
        worst_log = max(worst_log, log)
    tally.count += num_near
    told = {"largest_log": worst_log, "guessed_nodes": num_off_path, "visits": len(visits), "near_ties": num_near}
    measure = "largest difference of a probability, near-ties apart"
    return tally.check("window", verifier, shape, "nodes", measure, told, decisive=num_off_path)


SHAPES = ("chain", "static/branching=3x2x1")
ALPHA = 1e-6
"""False-alarm rate of ``draws`` and ``noise`` of one certificate together; all else is exact, or decided by replay."""

Progress = Callable[[int, int, str], None]
"""Called with (done, total, what runs now)."""


@dataclass(frozen=True)
class CertifyBudget:
    """Sample sizes, for each verifier and shape."""

    visits: int = 1  # steps of each request whose distributions are recomputed plainly
    distributions: int = 2  # contexts of ``law`` at each temperature
    batch_size: int = 4
    seeds: int = 100_000  # of ``noise``, a tree


def certify(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    verifiers: Sequence[str] | None = None,
    shapes: Sequence[str] = SHAPES,
    temperatures: Sequence[float] = (0.0, 0.7, 1.0),
    max_new_tokens: int = 16,
    seed: int = 0,
    budget: CertifyBudget | None = None,
    replay: Callable[[], CausalModel] | None = None,
    progress: Progress | None = None,
) -> Certificate:
    """Certify engine's target under engine's method of guessing (its verifier and shape are replaced by the given
    ones).

    verifiers: specs, by default every exact rule there is. A verifier and a shape that do not compose are left out, and
    named. replay loads the model that decides doubtful cases (default: the target by its name, transformers, float32).
    The engine is not changed. Raises ConfigError for invalid arguments, before anything is decoded.
    """
    begun = perf_counter()
    budget = budget or CertifyBudget()
    if not prompts:
        raise ConfigError("no prompts: a certificate needs at least one")
    if engine.speculative.method == "none":
        raise ConfigError("method 'none' guesses nothing: choose a method to certify, e.g. draft_model or ngram")
    if max_new_tokens < 2:
        raise ConfigError(f"max_new_tokens = {max_new_tokens} must be at least 2: one token leaves nothing to guess")
    if not temperatures:
        raise ConfigError("no temperature: give at least one")
    chosen = list(verifiers) if verifiers is not None else [name for name, rule in VERIFIERS.items() if rule.exact]
    pairs, left_out = combinations(engine.speculative, list(dict.fromkeys(chosen)), list(dict.fromkeys(shapes)))
    longest = engine.model.spec.max_positions - max_new_tokens
    if longest < 1:
        raise ConfigError(f"max_new_tokens = {max_new_tokens} leaves no room for a prompt in the model's context")
    ids = [token_ids(prompt, engine.tokenizer)[-longest:] for prompt in prompts]
    asked = [
        request
        for temperature in dict.fromkeys(temperatures)
        for request in requests(ids, temperature, max_new_tokens, seed)
    ]
    for config in pairs:
        config.load_verifier(engine.model)  # a missing head is reported now
    total = len(pairs) + 1
    say = progress or (lambda done, total, what: None)

    say(0, total, "plain decoding")
    plain = engine.with_method("none")
    expected = plain.generate_batch(asked, batch_size=1)
    judge = RoundingJudge(engine.model, replay)
    checks: list[Check] = []
    contexts: dict[str, list[VisitedContext]] = {}
    with torch.inference_mode():
        for done, config in enumerate(pairs, 1):
            say(done, total, f"{config.verify}, {config.shape}")
            alpha = ALPHA / 2 / len(pairs)
            try:
                checks += certify_pair(engine, config, asked, expected, judge, budget, seed, alpha, contexts)
            except (VerifierError, DrafterError) as error:
                checks.append(broken(config.verify, config.shape, "while decoding", error))
        say(total, total, "laws")
        checks += certify_distributions(contexts, seed, ALPHA / 2, budget.seeds)
    if not any(temperatures):  # texts say all there is of a rule that keeps them, but for other temperatures
        left_out += [f"{check.verifier}, noise: no temperature above 0" for check in checks if check.name == "noise"]
        checks = [check for check in checks if check.name != "noise"]
    order = ("contract", "window", "draws", "law", "joint", "noise", "tokens")
    checks.sort(key=lambda check: order.index(check.name))
    distance = None
    if engine.model.spec.is_quantised:
        say(total, total, "quantised weights")
        try:
            distance = weights_distance(engine.model, unquantised_of(engine.model), ids)
        except ForetellError as error:
            left_out.append(f"distance of {engine.model.spec.weights} weights from unquantised ones: {error}")
    settings: dict[str, Any] = {
        **{key: value for key, value in engine.resolved().items() if key != "exact"},
        "verifiers": chosen, "shapes": list(shapes), "temperatures": list(temperatures), "conditions": list(CONDITIONS),
        "num_prompts": len(prompts), "max_new_tokens": max_new_tokens, "seed": seed, "alpha": ALPHA,
    }  # fmt: skip
    return Certificate(tuple(checks), tuple(left_out), settings, perf_counter() - begun, distance)


def combinations(
    base: MethodConfig, verifiers: Sequence[str], shapes: Sequence[str]
) -> tuple[list[MethodConfig], list[str]]:
    """base with each legal pair of a verifier and a shape, and why the others are not legal. Raises ConfigError where none
    is."""
    pairs, left_out = [], []
    for verify in verifiers:
        verifier = parse_verifier(verify)
        for text in shapes:
            shape = parse_shape(text, base.num_speculative_tokens)
            reason = refusal(base.method, base.capabilities, verifier, shape, parse_draws(base.draws))
            if reason is None:
                pairs.append(replace(base, verify=verify, shape=text))
            else:
                left_out.append(f"{verify}, {text}: {reason}")
    if not pairs:
        raise ConfigError(f"nothing to certify: {left_out[0]}" if left_out else "no verifier or no shape was named")
    return pairs, left_out


def certify_pair(
    engine: Engine,
    config: MethodConfig,
    asked: Sequence[Request],
    expected: Sequence[Completion],
    judge: RoundingJudge,
    budget: CertifyBudget,
    seed: int,
    alpha: float,
    contexts: dict[str, list[VisitedContext]],
) -> list[Check]:
    """One verifier and shape: decode everything once, watched; then window, draws and tokens. Adds to contexts."""
    verifier, shape = config.verifier, config.shape
    draws = DrawChecks(seed)
    temperatures = list(dict.fromkeys(request.params.temperature for request in asked))
    runs: list[ObservedRun] = []
    visits: list[Visit] = []
    for temperature in temperatures:
        part = [index for index, request in enumerate(asked) if request.params.temperature == temperature]
        recorder = VisitRecorder(budget.visits, derive_seed(seed, part[0]), [draws])
        found = recorder.engine(engine, config).generate_batch(
            [asked[index] for index in part], batch_size=budget.batch_size
        )
        visits += recorder.visits
        contexts.setdefault(config.verify, []).extend(contexts_of(recorder.visits, budget.distributions))
        for index, completion in zip(part, found, strict=True):
            prompt = asked[index].prompt
            assert not isinstance(prompt, str)
            runs.append(ObservedRun(asked[index], list(prompt), expected[index], completion))
    checks = [check_window(engine.model, visits, judge, config.verify, shape, engine.width)]
    if verifier.exact and "q" in verifier.reads:
        checks.append(draws.check(config.verify, shape, alpha))
    same = [run for run in runs if run.request.params.temperature == 0 or follows_noise(verifier)]
    if same:
        checks.append(check_tokens(same, unwatched(engine, config), judge, verifier, shape))
    return checks


def certify_distributions(
    contexts: dict[str, list[VisitedContext]], seed: int, alpha: float, seeds: int
) -> list[Check]:
    """The distributions of every rule that reads no hidden states, at the contexts visited under it; lossy rules that
    read noise are measured by ``tokens``."""
    checks = []
    for spec, visited in contexts.items():
        verifier = parse_verifier(spec)
        if "taps" in verifier.reads:
            continue
        try:
            if "noise" not in verifier.reads:
                checks += [check_distribution(verifier, spec, visited), check_joint(verifier, spec, visited)]
            elif verifier.exact and "q" not in verifier.reads:
                checks.append(check_noise(verifier, spec, visited, seed, alpha / len(contexts), seeds))
        except VerifierError as error:
            checks.append(broken(spec, "small trees", "at the distributions of visited contexts", error))
    return checks


def broken(verify: str, shape: str, where: str, error: ForetellError) -> Check:
    """The check of a part that breaks its contract: nothing else can be said of it."""
    finding, measure = Finding(DEFECT, where, str(error)), "what the part does against its contract"
    return Check("contract", verify, shape, DEFECT, 0, "steps", None, None, measure, where, (finding,))
