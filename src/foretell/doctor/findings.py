"""From what was measured to what it means: which mistake is named, and when. Pure functions, and their thresholds."""

from collections.abc import Sequence
from math import inf, sqrt

from foretell.bench.stats import student
from foretell.doctor.contexts import NUM_SLOTS, TextScore
from foretell.doctor.diagnosis import HeadFinding, HeadTrial, Slot
from foretell.doctor.record import HeadRecord
from foretell.doctor.variants import FAULTS, HeadVariant
from foretell.model.target import ModelSpec
from foretell.train.metrics import expected_length

LEAST_T = 3.5
"""Standard errors (over texts) by which a variant's log chance of acceptance must be better."""
LEAST_GAIN = 0.05
"""Share by which its accepted tokens must grow: less is not why a head accepts little."""
LEAST_GAIN_LATER = 0.4
"""The same where the variant exits later: a later layer knows more, even for an adapter that was not trained on it."""
LOW = 0.75
"""Share of the expected acceptance (of all slots, or where their curve is not known of slot 1), below which a head accepts
little."""
LOW_UNKNOWN = 0.3
"""Acceptance in slot 1 below which it does where nothing is known of its training."""
TEMPLATE_GAIN, TEMPLATE_GAIN_UNKNOWN = 1.2, 1.35
"""By which factor accepted guesses must grow under another template, where a head accepts less than its record says, and
where there is no record."""
LEAST_TRAINED = 0.15
"""Acceptance in slot 1 that a head reaches after a hundred steps of training on its own target: one that has less, and does
not say what it was trained on, reads hidden states that are not those of its target."""


def weighted(values: Sequence[tuple[float, int]]) -> float:
    """The mean of (value, weight); 0 where there is no weight."""
    total = sum(weight for _, weight in values)
    return sum(value * weight for value, weight in values) / total if total else 0.0


def accepted(scores: Sequence[TextScore]) -> float:
    """Guesses accepted in a step, texts weighted by their places."""
    return weighted([(one.length - 1.0, one.num_places) for one in scores])


def trial(variant: HeadVariant, base: Sequence[TextScore], found: Sequence[TextScore]) -> HeadTrial:
    """A variant beside the head as it is, text by text."""
    before, after = accepted(base), accepted(found)
    return HeadTrial(variant.fault, variant.change, after, gain(before, after), paired(base, found))


def gain(before: float, after: float) -> float:
    """The share by which accepted guesses grow."""
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


def named(trials: Sequence[HeadTrial], base: Sequence[TextScore], dtype: str) -> list[HeadFinding]:
    """The best of the variants that are clearly better; and numbers that are not finite. dtype: the head's."""
    found = []
    broken, places = sum(one.not_finite for one in base), sum(one.num_places for one in base)
    if broken:
        found.append(
            HeadFinding(
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
            HeadFinding(
                best.fault,
                f"on the same texts {best.accepted:.2f} guesses a step would be accepted instead of "
                f"{accepted(base):.2f} ({best.standard_errors:.0f} standard errors)",
                best.change,
            )
        )
    return found


def slots_of(base: Sequence[TextScore], record: HeadRecord) -> list[Slot]:
    """The head's slots over all texts, beside what its record expects."""
    out = []
    for index in range(max(len(one.slots) for one in base)):
        there = [one.slots[index] for one in base if len(one.slots) > index]
        kept = [(slot.conditional, slot.num_places) for slot in there]
        agreed = [(slot.conditional_greedy, slot.num_places) for slot in there]
        expected = record.conditional[index] if index < len(record.conditional) else None
        out.append(Slot(index + 1, weighted(kept), weighted(agreed), expected))
    return out


def margin(values: Sequence[tuple[float, int]]) -> float:
    """By how much the mean of (value of a text, weight) may be too low by the choice of texts: half its 95 % interval, by
    Student's t; infinite for one text."""
    count, total = len(values), sum(weight for _, weight in values)
    if count < 2 or not total:
        return inf
    mean = weighted(values)
    squares = sum((weight * (value - mean)) ** 2 for value, weight in values)
    return student(count - 1) * sqrt(squares * count / (count - 1)) / total


def is_low(slots: Sequence[Slot], base: Sequence[TextScore], expected: float | None, *, certain: bool = True) -> bool:
    """Whether the head accepts clearly less than after training, in all slots or where they are not known in the first.
    certain: by more than the choice of texts explains."""
    if not slots:
        return True
    if expected is not None:
        lengths = [(one.length - 1.0, one.num_places) for one in base]
        return _highest(lengths, certain=certain) < LOW * expected
    first = slots[0]
    limit = LOW * first.expected if first.expected is not None else LOW_UNKNOWN
    there = [one.slots[0] for one in base if one.slots]
    return _highest([(slot.conditional, slot.num_places) for slot in there], certain=certain) < limit


def _highest(values: Sequence[tuple[float, int]], *, certain: bool) -> float:
    return weighted(values) + (margin(values) if certain else 0.0)


def of_record(record: HeadRecord, spec: ModelSpec, mine: str | None) -> list[HeadFinding]:
    """What the head's record says of its target. mine: this target's hash, where the record has one."""
    about, text = record.target, None
    if record.target_hash is not None and record.target_hash != mine:
        named = f" ({about.name})" if about.name else ""
        text = f"its record names the target {record.target_hash}{named}; this one is {mine}"
    elif about.architecture is not None and about.architecture != spec.architecture:
        text = f"the architecture of its target is {about.architecture}; this one has {spec.architecture}"
    elif about.num_layers is not None and about.num_layers != spec.num_layers:
        text = f"the number of layers of its target is {about.num_layers}; this one has {spec.num_layers}"
    remedy = "use the target that it was trained on, or train a head for this one with 'foretell train'"
    return [] if text is None else [HeadFinding("other_target", text, remedy)]


def of_template(trials: Sequence[HeadTrial], record: HeadRecord) -> list[HeadFinding]:
    """The template under which the head accepts as much as it should, if there is one."""
    best = max((one for one in trials if one.fault == "template"), key=lambda one: one.accepted, default=None)
    wanted = LOW * (expected_length(record.conditional[:NUM_SLOTS]) - 1.0) if record.conditional else LOW_UNKNOWN
    gain = TEMPLATE_GAIN if record.conditional else TEMPLATE_GAIN_UNKNOWN
    if best is None or best.gain < gain - 1.0 or best.accepted < wanted:
        return []
    return [
        HeadFinding(
            "template",
            f"in the format {best.change} it accepts {best.accepted:.2f} guesses a step, {1 + best.gain:.1f} times as many "
            "as in the given one",
            f"give prompts in the format {best.change}, or train the head on texts with this target's template",
        )
    ]


def remaining(slots: Sequence[Slot], stated: float, true: float, record: HeadRecord, target: str) -> HeadFinding:
    """What explains little acceptance where nothing else did."""
    first = slots[0].acceptance if slots else 0.0
    text = (
        f"slot 1 accepts {first:.2f}, no variant helps, and it is {stated:.0%} sure of guesses of which {true:.0%} hold"
    )
    if record.target_hash is None and (stated >= 2.0 * true or first < LEAST_TRAINED):
        return HeadFinding(
            "other_target",
            text,
            f"ask on which checkpoint it was trained: a fine-tuned or quantised {target} is another one",
        )
    return HeadFinding("untrained", text, "train it longer, on more of the target's own answers")


def refused(message: str) -> HeadFinding | None:
    """The fault that the loader's message is about; None where it is about none of them."""
    reasons = (
        ("token_mapping", ("d2t", "t2d", "token_map")),
        ("other_target", ("was trained for a target of", "reads the output of target layer")),
        ("layer_ids", ("target layers", "layer_ids", "layers to read")),
        ("dtype", ("not finite", "holds float8", "numbers")),
    )
    for fault, words in reasons:
        if any(word in message for word in words):
            return HeadFinding(fault, message, f"{FAULTS[fault]}: correct the file, or export the head again")
    return None


def notes(spec: ModelSpec, *, known: bool) -> list[str]:
    """What to know beside the figures. known: whether a curve of its training is recorded."""
    found = []
    if spec.is_quantised:
        found.append(
            f"the target's matrices are held as {spec.weights}: a head trained on the unquantised one reads other hidden "
            "states; --weights bf16 shows how much that costs"
        )
    if not known:
        found.append(
            "nothing is recorded of its training, so there is no expected curve: trained heads mostly accept 0.5 to 0.85 "
            "in slot 1 on prompts like those they were trained on, and slots of one head differ by a few percent"
        )
    return found
