"""Why a head accepts little: measured slot by slot on the target's own answers, against variants that undo one mistake.

Nothing is guessed from names alone. The head is measured as it is, and once with each mistake undone, on the same texts
under teacher forcing: a variant that accepts clearly more names the mistake and its remedy. Where none does, the texts
are written anew with other chat templates. What is left is read from the head's record and its confidence: sure of
itself and wrong is another target, unsure is hardly trained.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from foretell.checkpoints.directories import resolve
from foretell.core.errors import ConfigError, ModelError
from foretell.doctor import findings as f
from foretell.doctor.contexts import TextScore, answers, label, score
from foretell.doctor.diagnosis import HeadDiagnosis, HeadFinding, HeadTrial
from foretell.doctor.record import HeadRecord, read_record
from foretell.doctor.remap import remapped
from foretell.doctor.variants import KINDS, HeadVariant, variants
from foretell.engine.engine import Engine
from foretell.heads import formats
from foretell.heads.formats import load_kind
from foretell.heads.head import Head
from foretell.heads.teacher import Teacher
from foretell.model.identity import target_hash
from foretell.train.metrics import expected_length
from foretell.train.responses import Responses


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
        head = load_kind(name, model.spec, layout.head.method, target=model)
    except ModelError as error:
        refused = f.refused(str(error))
        if refused is None:
            hint = (
                "a draft model is examined by 'foretell doctor --draft NAME' (method draft_model), a target by --target"
            )
            raise ModelError(f"{error}; {hint}") from error
        return _unread(name, engine, refused, record)
    if not isinstance(head, KINDS):
        raise ModelError(f"{name}: a head of kind {head.method!r} does not guess, so there is nothing to diagnose")
    progress("the target's own answers")
    given, *others = prompts
    texts = answers(engine, prompts[given], max_new_tokens=max_new_tokens, seed=seed)
    tried = [
        *variants(head, model.spec, rope_theta=rope_theta),
        *remapped(head, engine),
    ]
    progress(f"{len(tried)} variants of the head")
    base, measured = _measure(head, tried, engine, texts)
    trials = [f.trial(variant, base, found) for variant, found in zip(tried, measured, strict=True)]
    findings = f.of_record(record, model.spec, target_hash(model) if record.target_hash is not None else None)
    findings += f.named(trials, base, str(head.dtype).removeprefix("torch."))
    slots = f.slots_of(base, record)
    known = record.conditional[: len(slots)]
    expected = expected_length(known) - 1.0 if slots and len(known) == len(slots) else None
    notes = f.notes(model.spec, known=bool(record.conditional))
    low = f.is_low(slots, base, expected)
    if (low or not record.conditional) and not findings:
        more, left = in_other_formats(
            engine, head, {name: prompts[name] for name in others}, base, max_new_tokens=max_new_tokens, seed=seed,
            progress=progress,
        )  # fmt: skip
        trials += more
        notes += left
        findings += f.of_template(trials, record)
    stated, true = (f.weighted([(getattr(one, key), one.num_places) for one in base]) for key in ("stated", "true"))
    if low and not findings:
        findings.append(f.remaining(slots, stated, true, record, model.spec.name))
    elif not findings and f.is_low(slots, base, expected, certain=False):
        notes.append(
            f"it accepts little on these texts, and {len(texts)} are too few to exclude chance: more prompts (--limit)"
        )
    return HeadDiagnosis(
        head=name,
        method=head.method,
        target=model.spec.name,
        num_texts=len(texts),
        num_tokens=texts.num_tokens,
        slots=slots,
        accepted=f.accepted(base),
        expected_accepted=expected,
        stated=stated,
        true=true,
        trials=sorted(trials, key=lambda trial: -trial.gain),
        findings=findings,
        notes=notes,
    )


def _measure(
    head: Head, tried: Sequence[HeadVariant], engine: Engine, texts: Responses
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


def in_other_formats(
    engine: Engine,
    head: Head,
    prompts: Mapping[str, Sequence[Sequence[int]]],
    base: Sequence[TextScore],
    *,
    max_new_tokens: int,
    seed: int,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[list[HeadTrial], list[str]]:
    """(the head on answers to the prompts in each format, what could not be tried). These are other texts than base's, so
    that only a large gain counts."""
    tried, left = [], []
    for name, ids in prompts.items():
        progress(f"answers in the format {name}")
        try:
            texts = answers(engine, ids, max_new_tokens=max_new_tokens, seed=seed)
        except ConfigError as error:  # a longer template, or a target that says nothing under it
            left.append(f"the format {name} was not tried: {error}")
            continue
        found, _ = _measure(head, [], engine, texts)
        accepted = f.accepted(found)
        tried.append(HeadTrial("template", name, accepted, f.gain(f.accepted(base), accepted), None))
    return tried, left


def _unread(name: str, engine: Engine, finding: HeadFinding, record: HeadRecord) -> HeadDiagnosis:
    return HeadDiagnosis(
        name, "unknown", engine.model.spec.name, 0, 0, [], 0.0, None, None, None, [], [finding],
        f.notes(engine.model.spec, known=bool(record.conditional)),
    )  # fmt: skip
