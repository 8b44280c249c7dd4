"""Why a head accepts little: measured slot by slot on the target's own answers, against variants that undo one mistake.

Nothing is guessed from names alone. The head is measured as it is, and once with each mistake undone, on the same texts
under teacher forcing: a variant that accepts clearly more names the mistake and its remedy. Where none does, the texts
are written anew with other chat templates. What is left is read from the head's record and its confidence: sure of
itself and wrong is another target, unsure is hardly trained.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretell.core.errors import ForetellError, ModelError
from foretell.doctor.contexts import NUM_SLOTS, TextScore, answers, label, score
from foretell.doctor.variants import FAULTS, KINDS, Variant, variants
from foretell.engine.engine import Engine
from foretell.methods.common import formats
from foretell.methods.common.head import Head
from foretell.methods.common.load import load_kind
from foretell.methods.common.teacher import Teacher
from foretell.methods.eagle.eagle3 import Eagle3Head
from foretell.methods.medusa.head import head_weight
from foretell.model.checkpoint import resolve
from foretell.train.metrics import expected_length
from foretell.train.responses import Responses, target_hash

LEAST_T = 3.5
"""Standard errors (over texts) by which a variant's log chance of acceptance must be better."""
LEAST_GAIN = 0.05
"""Share by which its accepted tokens must grow: less is not why a head accepts little."""
LEAST_GAIN_LATER = 0.4
"""The same where the variant exits later: a later layer knows more, even for an adapter that was not trained on it."""
LOW = 0.75
"""Of the expected acceptance in slot 1, below which a head accepts little."""
LOW_UNKNOWN = 0.3
"""Acceptance in slot 1 below which it does where nothing is known of its training."""
TEMPLATE_GAIN, TEMPLATE_GAIN_UNKNOWN = 1.2, 1.35
"""By which factor accepted guesses must grow under another template, where a head accepts less than its record says, and
where there is no record."""
LEAST_TRAINED = 0.15
"""Acceptance in slot 1 that a head reaches after a hundred steps of training on its own target: one that has less, and does
not say what it was trained on, reads hidden states that are not those of its target."""
ALIKE = 0.6
"""Cosine of a column of the head and a row of the target's own, from which on the one was made from the other."""
MOST_PRODUCTS = 4e11
"""Multiplications that comparing all columns with all rows may take."""


@dataclass(frozen=True)
class Slot:
    """One guess of a line, 1 the first, given that those before it were kept; sampled at temperature 1, teacher-forced."""

    slot: int
    acceptance: float
    agreement: float  # the share of places at which head and target have one most probable token
    expected: float | None  # acceptance after training, as the head's record has it


@dataclass(frozen=True)
class Finding:
    """One mistake, named."""

    fault: str  # one of FAULTS
    evidence: str
    remedy: str


@dataclass(frozen=True)
class Trial:
    """One variant, or one template, beside the head as it is."""

    fault: str
    change: str
    accepted: float  # guesses accepted a step, expected
    gain: float  # share of those of the head as it is
    standard_errors: float | None  # of the log chance of acceptance; None for other texts


@dataclass(frozen=True)
class HeadDiagnosis:
    """What was measured of a head, and what it says."""

    head: str
    method: str
    target: str
    num_texts: int
    num_tokens: int  # of answers
    slots: list[Slot]
    accepted: float  # guesses accepted in a step of NUM_SLOTS, expected
    expected_accepted: float | None
    stated: float | None  # how sure the head is of its first guess, mean ...
    true: float | None  # ... and how often it would be right
    trials: list[Trial]
    findings: list[Finding]
    notes: list[str] = field(default_factory=list)

    @property
    def is_healthy(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Record:
    """What lies beside a head of its training."""

    target: formats.TargetInfo
    target_hash: str | None = None
    conditional: tuple[float, ...] = ()  # held-out acceptance by slot


def read_record(directory: Path) -> Record:
    """Of a head's directory; empty where nothing is recorded."""
    try:
        about = formats.describe_target(directory)
    except ForetellError:
        about = formats.TargetInfo()
    try:
        found = json.loads((directory / "record.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Record(about)
    if not isinstance(found, Mapping):
        return Record(about)
    result = found.get("result")
    rates = result.get("conditional", []) if isinstance(result, Mapping) else []
    mark = found.get("target_hash")
    return Record(
        about, mark if isinstance(mark, str) else None, tuple(rate for rate in rates if isinstance(rate, float))
    )


def diagnose(
    engine: Engine,
    name: str,
    prompts: Mapping[str, Sequence[Sequence[int]]],
    *,
    max_new_tokens: int = 48,
    seed: int = 0,
    rope_theta: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> HeadDiagnosis:
    """Diagnose a head for the engine's target.

    name: as ``--draft`` takes it. prompts: by the name of their format, the given one first, as token ids; the others are
    tried where the head accepts little and nothing else explains it. rope_theta: the target's own, where it is known.
    progress is called with what is done next. Raises ConfigError, and ModelError where the head is none that is known.
    """
    model = engine.model
    directory = Path(resolve(name))
    record = read_record(directory)
    try:
        layout = formats.detect(directory)
        head = load_kind(name, model.spec, layout.head.method)
    except ModelError as error:
        refused = _refused(str(error))
        if refused is None:
            hint = "a draft model is examined by 'foretell doctor --draft NAME', with method draft_model"
            raise ModelError(f"{error}; {hint}") from error
        return _unread(name, engine, refused, record)
    if not isinstance(head, KINDS):
        raise ModelError(f"{name}: a head of kind {head.method!r} does not guess, so there is nothing to diagnose")
    progress("the target's own answers")
    given, *others = prompts
    texts = answers(engine, prompts[given], max_new_tokens=max_new_tokens, seed=seed)
    tried = [
        *variants(head, model.spec, rope_theta=rope_theta),
        *_remapped(head, engine),
    ]
    progress(f"{len(tried)} variants of the head")
    base, measured = _measure(head, tried, engine, texts)
    trials = [_trial(variant, base, found) for variant, found in zip(tried, measured, strict=True)]
    findings = _static(engine, record)
    findings += _named(trials, base, head)
    slots = _slots(base, record)
    known = record.conditional[: len(slots)]
    expected = expected_length(known) - 1.0 if slots and len(known) == len(slots) else None
    low = _is_low(slots, _accepted(base), expected)
    if (low or not record.conditional) and not findings:
        for other in others:
            progress(f"answers in the format {other}")
            trials.append(_template(engine, head, other, prompts[other], base, max_new_tokens, seed))
        findings += _of_template(trials, record)
    stated, true = (_weighted([(getattr(one, key), one.num_places) for one in base]) for key in ("stated", "true"))
    if low and not findings:
        findings.append(_remaining(slots, stated, true, record, engine))
    return HeadDiagnosis(
        head=name,
        method=head.method,
        target=model.spec.name,
        num_texts=len(texts),
        num_tokens=texts.num_tokens,
        slots=slots,
        accepted=_accepted(base),
        expected_accepted=expected,
        stated=stated,
        true=true,
        trials=sorted(trials, key=lambda trial: -trial.gain),
        findings=findings,
        notes=_notes(engine, known=bool(record.conditional)),
    )


def _measure(
    head: Head, tried: Sequence[Variant], engine: Engine, texts: Responses
) -> tuple[list[TextScore], list[list[TextScore]]]:
    """The head and its variants on every text."""
    teacher = Teacher(engine.model)
    layers = sorted({layer for one in (head, *(variant.head for variant in tried)) for layer in one.taps})
    base: list[TextScore] = []
    found: list[list[TextScore]] = [[] for _ in tried]
    for index in range(len(texts)):
        labeled = label(teacher, texts, index, layers)
        base.append(score(head, teacher, labeled, layers))
        for place, variant in enumerate(tried):
            found[place].append(score(variant.head, teacher, labeled, layers))
    return base, found


def _weighted(values: Sequence[tuple[float, int]]) -> float:
    total = sum(weight for _, weight in values)
    return sum(value * weight for value, weight in values) / total if total else 0.0


def _accepted(scores: Sequence[TextScore]) -> float:
    """Guesses accepted in a step, texts weighted by their places."""
    return _weighted([(one.length - 1.0, one.num_places) for one in scores])


def _trial(variant: Variant, base: Sequence[TextScore], found: Sequence[TextScore]) -> Trial:
    """A variant beside the head as it is, text by text."""
    before, after = _accepted(base), _accepted(found)
    return Trial(variant.fault, variant.change, after, _gain(before, after), paired(base, found))


def _gain(before: float, after: float) -> float:
    return after / max(before, 1e-3) - 1.0


def paired(base: Sequence[TextScore], found: Sequence[TextScore]) -> float | None:
    """The difference of the log chances of acceptance in standard errors, a text being one draw; None for fewer than
    two."""
    sums = [other.log_chance - mine.log_chance for mine, other in zip(base, found, strict=True)]
    counts = [mine.num_places for mine in base]
    if len(sums) < 2 or not sum(counts):
        return None
    mean = sum(sums) / sum(counts)
    excess = [value - mean * count for value, count in zip(sums, counts, strict=True)]
    error = sqrt(sum(value * value for value in excess) * len(sums) / (len(sums) - 1))
    return sum(sums) / error if error else None


def _named(trials: Sequence[Trial], base: Sequence[TextScore], head: Head) -> list[Finding]:
    """The best of the variants that are clearly better; and numbers that are not finite."""
    found = []
    broken, places = sum(one.not_finite for one in base), sum(one.num_places for one in base)
    if broken:
        dtype = str(head.dtype).removeprefix("torch.")
        found.append(
            Finding(
                "dtype",
                f"at {broken} of {places} places its logits are not finite in {dtype}",
                f"run target and head in bfloat16 or float32, not {dtype}: --dtype bfloat16",
            )
        )
    better = [
        trial
        for trial in trials
        if trial.standard_errors is not None
        and trial.standard_errors >= LEAST_T
        and trial.gain >= (LEAST_GAIN_LATER if trial.change.startswith("exit_layer") else LEAST_GAIN)
    ]
    if better and not broken:
        best = max(better, key=lambda trial: trial.accepted)
        found.append(
            Finding(
                best.fault,
                f"on the same texts {best.accepted:.2f} guesses a step would be accepted instead of "
                f"{_accepted(base):.2f} ({best.standard_errors:.0f} standard errors)",
                best.change,
            )
        )
    return found


def _slots(base: Sequence[TextScore], record: Record) -> list[Slot]:
    out = []
    for index in range(max(len(one.slots) for one in base)):
        there = [one.slots[index] for one in base if len(one.slots) > index]
        kept = [(slot.conditional, slot.num_places) for slot in there]
        agreed = [(slot.conditional_greedy, slot.num_places) for slot in there]
        expected = record.conditional[index] if index < len(record.conditional) else None
        out.append(Slot(index + 1, _weighted(kept), _weighted(agreed), expected))
    return out


def _is_low(slots: Sequence[Slot], accepted: float, expected: float | None) -> bool:
    """Whether the head accepts clearly less than after training, in all slots or where they are not known in the first."""
    if not slots:
        return True
    if expected is not None:
        return accepted < LOW * expected
    first = slots[0]
    return first.acceptance < (LOW * first.expected if first.expected is not None else LOW_UNKNOWN)


def _static(engine: Engine, record: Record) -> list[Finding]:
    """What the head's record says of its target."""
    if record.target_hash is not None and record.target_hash != (mine := target_hash(engine.model)):
        named = f" ({record.target.name})" if record.target.name else ""
        return [
            Finding(
                "other_target",
                f"its record names the target {record.target_hash}{named}; this one is {mine}",
                "use the target that it was trained on, or train a head for this one with 'foretell train'",
            )
        ]
    about, spec = record.target, engine.model.spec
    for what, said, have in (
        ("architecture", about.architecture, spec.architecture),
        ("number of layers", about.num_layers, spec.num_layers),
    ):
        if said is not None and said != have:
            return [
                Finding(
                    "other_target",
                    f"the {what} of its target is {said}; this one has {have}",
                    "use the target that it was trained on, or train a head for this one with 'foretell train'",
                )
            ]
    return []


def _template(
    engine: Engine, head: Head, name: str, prompts: Sequence[Sequence[int]], base: Sequence[TextScore], most: int, seed: int
) -> Trial:  # fmt: skip
    """The head on answers to the prompts in another format: other texts, so that only a large gain counts."""
    found, _ = _measure(head, [], engine, answers(engine, prompts, max_new_tokens=most, seed=seed))
    accepted = _accepted(found)
    return Trial("template", name, accepted, _gain(_accepted(base), accepted), None)


def _of_template(trials: Sequence[Trial], record: Record) -> list[Finding]:
    """The template under which the head accepts as much as it should, if there is one."""
    best = max((one for one in trials if one.fault == "template"), key=lambda one: one.accepted, default=None)
    wanted = LOW * (expected_length(record.conditional[:NUM_SLOTS]) - 1.0) if record.conditional else LOW_UNKNOWN
    gain = TEMPLATE_GAIN if record.conditional else TEMPLATE_GAIN_UNKNOWN
    if best is None or best.gain < gain - 1.0 or best.accepted < wanted:
        return []
    return [
        Finding(
            "template",
            f"in the format {best.change} it accepts {best.accepted:.2f} guesses a step, {1 + best.gain:.1f} times as many "
            "as in the given one",
            f"give prompts in the format {best.change}, or train the head on texts with this target's template",
        )
    ]


def _remaining(slots: Sequence[Slot], stated: float, true: float, record: Record, engine: Engine) -> Finding:
    """What explains little acceptance where nothing else did."""
    first = slots[0].acceptance if slots else 0.0
    text = (
        f"slot 1 accepts {first:.2f}, no variant helps, and it is {stated:.0%} sure of guesses of which {true:.0%} hold"
    )
    if record.target_hash is None and (stated >= 2.0 * true or first < LEAST_TRAINED):
        return Finding(
            "other_target",
            text,
            f"ask on which checkpoint it was trained: a fine-tuned or quantised {engine.model.spec.name} is another one",
        )
    return Finding("untrained", text, "train it longer, on more of the target's own answers")


def _refused(message: str) -> Finding | None:
    """The fault that the loader's message is about; None where it is about none of them."""
    reasons = (
        ("token_mapping", ("d2t", "t2d", "token_map")),
        ("other_target", ("was trained for a target of", "reads the output of target layer")),
        ("layer_ids", ("target layers", "layer_ids", "layers to read")),
        ("dtype", ("not finite", "holds float8", "numbers")),
    )
    for fault, words in reasons:
        if any(word in message for word in words):
            return Finding(fault, message, f"{FAULTS[fault]}: correct the file, or export the head again")
    return None


def _unread(name: str, engine: Engine, finding: Finding, record: Record) -> HeadDiagnosis:
    return HeadDiagnosis(
        name, "unknown", engine.model.spec.name, 0, 0, [], 0.0, None, None, None, [], [finding],
        _notes(engine, known=bool(record.conditional)),
    )  # fmt: skip


def _notes(engine: Engine, *, known: bool) -> list[str]:
    spec, notes = engine.model.spec, []
    if spec.is_quantised:
        notes.append(
            f"the target's matrices are held as {spec.weights}: a head trained on the unquantised one reads other hidden "
            "states; --weights bf16 shows how much that costs"
        )
    if not known:
        notes.append(
            "nothing is recorded of its training, so there is no expected curve: trained heads mostly accept 0.5 to 0.85 "
            "in slot 1 on prompts like those they were trained on, and slots of one head differ by a few percent"
        )
    return notes


def _remapped(head: Head, engine: Engine) -> list[Variant]:
    """The head with the vocabulary that its output matrix itself suggests: columns of heads that began as the target's
    are still most like the rows that they came from."""
    if not isinstance(head, Eagle3Head) or head.vocabulary is None:
        return []
    spec = engine.model.spec
    if float(len(head.d2t)) * spec.vocab_size * spec.hidden_size > MOST_PRODUCTS:
        return []
    rows = torch.nn.functional.normalize(head_weight(engine.model), dim=-1)
    columns = torch.nn.functional.normalize(head.lm_head.weight.float(), dim=-1)
    ids, alike = _nearest(columns, rows)
    if float(alike.median()) < ALIKE or bool((ids == head.target_ids).float().mean() > 0.5):
        return []
    made = Eagle3Head(head.config)
    made.load_state_dict(head.state_dict(), assign=True)
    index = torch.arange(len(ids), device=ids.device)
    made.d2t = ids - index
    made.eval().requires_grad_(requires_grad=False)
    return [Variant("token_mapping", "d2t as the rows of lm_head suggest: each is most like another token's", made)]


def _nearest(columns: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(ids [DV] int64 of the rows [V, H] most like each column [DV, H], their cosines [DV])."""
    ids, alike = [], []
    for at in range(0, len(columns), 1024):
        part = columns[at : at + 1024]
        best, index = (part @ rows.t()).max(1)
        ids.append(index)
        alike.append(best)
    return torch.cat(ids), torch.cat(alike)
