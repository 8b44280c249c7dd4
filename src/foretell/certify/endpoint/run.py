"""``certify_endpoint``: all checks of an endpoint, in order, and what they amount to."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from foretell.certify.endpoint.client import AnswerError, Endpoint
from foretell.certify.endpoint.diagnosis import faults_of, settled
from foretell.certify.endpoint.laws import check_calibration, check_law, scale
from foretell.certify.endpoint.limits import check_length, check_seed, check_stop
from foretell.certify.endpoint.report import EndpointBudget, EndpointCertificate, EndpointCheck, Session, skipped
from foretell.certify.endpoint.scores import check_logprobs
from foretell.certify.endpoint.texts import check_filters, check_greedy, check_load, check_penalties, check_stream
from foretell.certify.report import DEFECT, Finding
from foretell.core.errors import ConfigError
from foretell.core.params import SamplingParams

CHECKS: dict[str, Callable[[Session], EndpointCheck]] = {
    "greedy": check_greedy,
    "penalties": check_penalties,
    "filters": check_filters,
    "logprobs": check_logprobs,
    "stream": check_stream,
    "stop": check_stop,
    "length": check_length,
    "seed": check_seed,
    "load": check_load,
}
SAMPLED = ("law", "calibration")
NAMES = (*CHECKS, *SAMPLED)


def certify_endpoint(
    endpoint: Endpoint,
    prompts: Sequence[str],
    *,
    reference: Endpoint | None = None,
    temperatures: Sequence[float] = (0.7, 1.0),
    budget: EndpointBudget | None = None,
    seed: int = 0,
    skip: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
) -> EndpointCertificate:
    """Check an endpoint from outside.

    reference: the same model without speculation: another server, or ``endpoint.sibling`` with the fields that switch
    speculation off. Without it the endpoint is compared with itself alone. skip: names of ``NAMES`` to leave out.
    Raises ConfigError for options that are not valid, and where nothing answers.
    """
    budget = budget or EndpointBudget()
    if not prompts:
        raise ConfigError("no prompts: give at least one")
    unknown = [name for name in skip if name not in NAMES]
    if unknown:
        raise ConfigError(f"check {unknown[0]!r} is not known; known: {', '.join(NAMES)}")
    for value in temperatures:
        SamplingParams(temperature=value)
    sampled = sorted({float(value) for value in temperatures if value > 0})
    begin = perf_counter()
    abilities = endpoint.probe(prompts[0])
    if reference is not None:
        found = reference.probe(prompts[0])
        if found.api != abilities.api:
            raise ConfigError(
                f"{endpoint.shown} is asked by {abilities.api}, the reference by {found.api}: choose one with --api"
            )
    session = Session(endpoint, reference, prompts, sampled, budget, seed, progress or (lambda what: None))
    checks = []
    for name, check in CHECKS.items():
        if name not in skip:
            session.progress(name)
            checks.append(guarded(name, check, session))
    shared = max(1, len(sampled) * sum(name not in skip for name in SAMPLED))
    scaled = ("", "left out") if "calibration" in skip else _scaled(session)
    for value in sampled:
        if "law" not in skip:
            checks.append(guarded(f"law at T = {value:g}", check_law, session, value, shared))
        if "calibration" not in skip:
            name = f"calibration at T = {value:g}"
            checks.append(guarded(name, check_calibration, session, value, scaled, shared))
    settings: dict[str, Any] = {
        "url": endpoint.shown, "model": endpoint.model, "fields": endpoint.extra, "takes": abilities.words(),
        "reference": None if reference is None else {
            "url": reference.shown, "model": reference.model, "fields": reference.extra,
            "takes": reference.abilities.words(),
        },
        "num_prompts": len(prompts), "temperatures": sampled, "seed": seed, "left_out": list(skip),
        **{name: getattr(budget, name) for name in EndpointBudget.__dataclass_fields__},
    }  # fmt: skip
    judged = settled(checks)
    return EndpointCertificate(judged, faults_of(judged), settings, perf_counter() - begin)


def _scaled(session: Session) -> tuple[str, str]:
    try:
        return scale(session)
    except AnswerError as error:
        return "", str(error)


def guarded(name: str, check: Callable[..., EndpointCheck], *given: Any) -> EndpointCheck:
    """A check; a request that the endpoint refuses leaves it out, and one that fails is a defect."""
    try:
        return check(*given)
    except AnswerError as error:
        question = "Are its requests answered?"
        if error.is_refusal:
            return skipped(name, question, f"the endpoint refuses it: {error}")
        finding = Finding(DEFECT, "a request", str(error), {"kind": "failed", "status": error.status})
        return EndpointCheck(name, question, DEFECT, "-", "a request failed", (finding,))
