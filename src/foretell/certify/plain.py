"""Plain decoding, one node a pass, on a fresh cache: what every observed distribution is compared with."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretell.certify.recorder import Text, Visit
from foretell.core.errors import ForetellError
from foretell.core.params import SamplingParams
from foretell.core.probs import History, Paths, Processors, logits_to_probs
from foretell.core.tree import layout, pad_tree, root_tree
from foretell.model.load import load_model
from foretell.model.prefill import feed, round_up
from foretell.model.target import CausalModel, Target

ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 2e-1}
"""How far rounding may move a log probability at temperature 1, by the model's dtype. Measured on the bundled pair between
passes of different widths: 1.5e-5 in float32, 0.06 in bfloat16."""


@dataclass(frozen=True)
class Tolerance:
    """What two passes over the same context may differ by."""

    log: float  # of a log probability
    probability: float

    @classmethod
    def of(cls, dtype: torch.dtype, params: SamplingParams) -> "Tolerance":
        """The tolerance for temperatures below 1 and repetition penalties, which magnify differences of logits."""
        factor = max(1.0, 1.0 / params.temperature) if params.temperature else 1.0
        log = ROUNDING[dtype] * factor * max(1.0, params.repetition_penalty, 1.0 / params.repetition_penalty)
        return cls(log, log / 2)  # |dp| <= p (1 - p) * 2 log


def distribution_of(logits: Tensor, text: Text, ids: Sequence[int], model: CausalModel) -> Tensor:
    """[V] the production distribution after the whole text ids, from its last logits [V]: one node, nothing but history."""
    spec = model.spec
    processors = Processors(
        [text.params], vocab_size=spec.vocab_size, end_token_ids=spec.eos_token_ids, device=spec.device
    )
    last = torch.tensor([[ids[-1]]], device=spec.device)
    paths = Paths(last, torch.ones(1, 1, 1, dtype=torch.bool, device=spec.device))
    return logits_to_probs(logits[None, None], processors, History([list(ids)], [text.num_prompt]), paths)[0, 0]


def unfiltered(text: Text) -> Text:
    """The same text at temperature 1 without top-k, top-p and min-p: what the filters choose from."""
    return replace(text, params=replace(text.params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0))


def one_node(target: Target, token: int, length: int, width: int) -> Tensor:
    """[V] logits after one token that follows ``length`` committed slots, as ``step`` runs it: width nodes where width
    > 0."""
    tree = root_tree(torch.tensor([token], device=target.spec.device))
    if width > 1:
        tree = pad_tree(tree, width)
    capacity = target.cache.capacity
    span = min(capacity, round_up(length + tree.num_nodes, 512 if width else 64))
    plan = layout(tree.parent, torch.tensor([length], device=target.spec.device), capacity, span=span)
    logits = target.forward(tree.tokens, plan).logits
    assert logits is not None
    return logits[0, 0].clone()


def after(model: CausalModel, ids: Sequence[int], *, width: int = 0) -> Tensor:
    """[V] logits after a text: a fresh cache, the text but its last token as a prompt, then one node."""
    target = Target(model, 1, round_up(len(ids) + max(1, width), 512 if width else 64))
    if len(ids) > 1:
        feed(target, [list(ids[:-1])], [0], head=False, span_multiple=512 if width else 64)
    return one_node(target, ids[-1], len(ids) - 1, width)


def plain_logits(model: CausalModel, visits: Sequence[Visit], width: int) -> Iterator[tuple[Visit, int, Tensor]]:
    """(visit, node, logits [V]) of every node of every visit, the text read once a request.

    Long prefixes come first, so that what a path leaves in the cache lies after all that is still to be read; a node
    follows its parent at once or after its siblings' subtrees, so that the cache holds its own path.
    """
    by_request: dict[int, list[Visit]] = {}
    for visit in visits:
        by_request.setdefault(int(visit.text.params.seed or 0), []).append(visit)
    for group in by_request.values():
        group.sort(key=lambda visit: -len(visit.text.ids))
        longest = group[0].text.ids
        room = max(visit.tokens.shape[0] for visit in group) + max(1, width)
        target = Target(model, 1, round_up(len(longest) + room, 512 if width else 64))
        if len(longest) > 1:
            feed(target, [longest[:-1]], [0], head=False, span_multiple=512 if width else 64)
        for visit in group:
            parent, tokens = visit.parent.tolist(), visit.tokens.tolist()
            waiting = [(0, len(visit.text.ids) - 1)]
            while waiting:
                node, length = waiting.pop()
                yield visit, node, one_node(target, tokens[node], length, width)
                waiting += [(child, length + 1) for child in range(1, len(parent)) if parent[child] == node]


class RoundingJudge:
    """Decides whether rounding explains a difference: by what lies next to the plain distribution, by the pass at equal
    width, and by the context computed in float32 by the unmodified transformers model (``replay``)."""

    def __init__(self, model: CausalModel, replay: Callable[[], CausalModel] | None) -> None:
        self.model = model
        self._load = replay
        self._replay: CausalModel | None = None

    @property
    def replay(self) -> CausalModel:
        """The model of the replay; the target itself where there is no other."""
        if self._replay is None:
            self._replay = self._load() if self._load is not None else reference(self.model)
        return self._replay

    def explain(self, visit: Visit, node: int, observed: Tensor, logits: Tensor) -> tuple[bool, str]:
        """(whether rounding explains it, the figures in words) of an observed probs [V] beyond tolerance of the plain
        one."""
        ids, text = visit.context(node), visit.text
        tolerance = Tolerance.of(self.model.spec.dtype, text.params)
        plain = distribution_of(logits, text, ids, self.model)
        gap = distance(observed, plain)
        nearest = min(
            (distance(observed, probs) for probs in self.nearby(logits, text, ids, observed, plain)), default=gap
        )
        if nearest <= 4 * tolerance.probability:  # the moved logits themselves change probabilities that much
            return True, f"tokens within {tolerance.log:.1e} of the edge of a filter, or of the largest logit"
        width = max(2, visit.tokens.shape[0])
        same = distance(observed, distribution_of(after(self.model, ids, width=width), text, ids, self.model))
        exact = distribution_of(after(self.replay, ids).to(logits.device), text, ids, self.model)
        mine, its = distance(observed, exact), distance(plain, exact)
        words = f"from plain {gap:.1e}, at width {width} {same:.1e}; from float32 {mine:.1e}, plain {its:.1e}"
        bounded = gap <= 20 * tolerance.probability
        return bounded and same <= tolerance.probability and mine <= max(tolerance.probability, 4 * its), words

    def nearby(self, logits: Tensor, text: Text, ids: Sequence[int], observed: Tensor, plain: Tensor) -> list[Tensor]:
        """Distributions of logits that differ from these by no more than rounding, where the distributions disagree on
        what is possible.

        A token that only the observed distribution allows is raised together with all below it, one that only the plain
        distribution allows is lowered likewise: this moves the edges of top-k, top-p, min-p and of the argmax over the
        token.
        """
        inside, outside = (observed > 0) & ~(plain > 0), (plain > 0) & ~(observed > 0)
        step = 2 * ROUNDING[self.model.spec.dtype]
        level = distribution_of(logits.double(), unfiltered(text), ids, self.model)
        raised = [(inside, outside, step)] if bool(inside.any()) else []
        raised += [(outside, inside, -step)] if bool(outside.any()) else []
        # Of tokens that are equal to the last bit, those that the two distributions disagree on move apart.
        moved = [logits.double() + change * ((level <= level[which].max()) & ~other) for which, other, change in raised]
        if len(moved) == 2:
            moved.append(moved[0] + moved[1] - logits.double())
        return [distribution_of(shifted, text, ids, self.model).to(plain.dtype) for shifted in moved]


def distance(a: Tensor, b: Tensor) -> float:
    """Largest difference of a probability; infinite where one distribution is none."""
    gap = float((a.double() - b.double()).abs().max())
    return gap if gap == gap else float("inf")


def reference(model: CausalModel) -> CausalModel:
    """The transformers model in float32 of the same name, where it can be loaded and is not quantised; else the model
    itself."""
    spec = model.spec
    if spec.implementation == "table" or spec.is_quantised:  # what is certified is the quantised model's distribution
        return model
    try:
        return load_model(spec.name, dtype="float32", device=str(spec.device), implementation="transformers")
    except (ForetellError, ValueError):
        return model
