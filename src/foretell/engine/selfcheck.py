"""Does a model, as it is loaded here, keep the text when it reads guesses? A check of about a second.

Speculation keeps the text only where a pass over many nodes gives each of them the logits of plain decoding. That is a
property of kernels, of the cache and of this machine, so it is seen here before guesses are trusted: random tokens are read
in every way that decoding reads them, and one node a pass. ``foretell certify`` is the long form: it decodes with drafters
and verifiers.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from foretell.core.errors import first_line
from foretell.core.measured import machine, read, write
from foretell.core.provenance import accelerator, source_digest
from foretell.core.tree import chain_parent, layout
from foretell.engine.prefix import PrefixStore
from foretell.model.cache import KVCache
from foretell.model.prefill import feed, round_up
from foretell.model.recurrent import RecurrentCache
from foretell.model.target import CausalModel, Target

log = logging.getLogger(__name__)
FORMAT = 1
PROMPT = 24  # tokens; a prefix's block has 16
SHARED = 20  # of them with another prompt
WIDTHS = (2, 3, 4, 8, 16, 33)  # kernels have tiles of several of them
LONG = 288  # tokens: more than one segment of the native attention
BUDGET_S = 0.4  # for the line, and again for the long text: what takes longer is made shorter, or left out
LIMIT_S = 4.0  # in all: of models with long passes the last comparisons are left out
TREE = (-1, 0, 0, 1, 1, 2, 3, 5)
FIRST, SECOND, THIRD = (0, 1, 3, 6), (0, 2, 5, 7), (0, 1, 4)
"""Its paths."""
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Of the largest logit: what passes of several widths may differ by where kernels promise no bits."""
LEFT = "So nothing is guessed, and requests are decoded one by one, each from its own prompt. Please report this line"
"""What a command does about a fault."""


@dataclass(frozen=True)
class SelfCheck:
    """What was seen."""

    paths: tuple[str, ...]  # ways of reading that were compared with plain decoding, each once
    largest: float  # difference of a logit, as a share of the largest one; 0.0: every bit is the same
    fault: str = ""  # "": none
    error: str = ""  # what ended the check, if anything did
    seconds: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        """One line for the user."""
        if self.fault:
            return f"guesses do not keep the text here: {self.fault}. {LEFT}"
        if self.error or not self.paths:
            reason = self.error or "nothing could be compared"
            return f"whether guesses keep the text could not be checked here: {reason}"
        how = "bit-identical" if self.largest == 0 else f"logits within {self.largest:.0e} of the largest: rounding"
        return f"guesses keep the text: checked here, {len(self.paths)} paths, {how}"


class Read(NamedTuple):
    """What a pass gave for some nodes."""

    logits: Tensor  # [n, V] float32
    taps: Tensor  # [n, T * H], T tapped layers


def self_check(model: CausalModel) -> SelfCheck:
    """The check as an earlier start of the same code, machine and model kept it, or made now. What found a fault is not
    kept."""
    key = json.loads(
        json.dumps(
            {
                "selfcheck": FORMAT,
                "code": source_digest(),
                "machine": {**machine(), "accelerator": accelerator()},
                "model": model.spec.described,
                "loras": model.loras,
            },
            sort_keys=True,
        )
    )
    try:
        kept = read(key)
        return SelfCheck(tuple(map(str, kept["paths"])), float(kept["largest"]))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.debug("self check: what an earlier start kept is not used (%s)", error)
    made = check_passes(model)
    if not made.fault and not made.error:
        try:
            write(key, {name: value for name, value in asdict(made).items() if name in ("paths", "largest")})
        except OSError as error:
            log.debug("self check: cannot be kept (%s)", error)
    return made


@torch.inference_mode()
def check_passes(model: CausalModel) -> SelfCheck:
    """Read random tokens in every way that decoding does, and compare with one node a pass."""
    begun = perf_counter()
    paths: dict[str, None] = {}
    largest, fault = 0.0, ""
    try:
        for name, here, plain in _comparisons(model, ()):
            paths[name] = None
            difference = _difference(here, plain)
            if not difference <= ROUNDING.get(model.spec.dtype, ROUNDING[torch.float32]):
                fault = f"{name}: logits differ from plain decoding's by {difference:.1g} of the largest"
                fault += _where(model, name)
                break
            largest = max(largest, difference)
            if perf_counter() - begun > LIMIT_S:
                break
    except Exception as error:  # decoding, which may never read so, is not stopped by what reads to be sure
        return SelfCheck(tuple(paths), largest, fault, first_line(error), perf_counter() - begun)
    return SelfCheck(tuple(paths), largest, fault, "", perf_counter() - begun)


def _where(model: CausalModel, path: str) -> str:
    """The first layer of which the output differs, in words: the same once more, with all layers tapped."""
    num_layers = model.spec.num_layers
    limit = ROUNDING.get(model.spec.dtype, ROUNDING[torch.float32])
    for name, here, plain in _comparisons(model, tuple(range(num_layers))):
        if name != path:
            continue
        layers = zip(here.taps.chunk(num_layers, -1), plain.taps.chunk(num_layers, -1), strict=True)
        for layer, (mine, other) in enumerate(layers):
            if not _share(mine.float(), other.float()) <= limit:
                return f", first in layer {layer} of {num_layers}"
        if _difference(here, plain) > limit:
            return ", in the head"
    return ", and not when it was read again"


def _difference(here: Read, plain: Read) -> float:
    return _share(here.logits, plain.logits)


def _share(one: Tensor, other: Tensor) -> float:
    """The largest difference over the largest number; nan where a number is none."""
    if torch.equal(one, other):
        return 0.0
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-9))


class _PassReader:
    """Texts of one model, read as decoding reads them."""

    def __init__(self, model: CausalModel, taps: Sequence[int]) -> None:
        self.model, self.taps, self.device = model, tuple(taps), model.spec.device
        generator = torch.Generator().manual_seed(7)
        self.tokens = torch.randint(0, model.spec.vocab_size, (4096,), generator=generator).tolist()
        self.seconds_a_pass = 0.0
        self._known: dict[tuple[int, ...], KVCache] = {}  # by adapter and prompt; no token follows them there

    def some(self, start: int, count: int) -> list[int]:
        """count tokens that depend on start alone."""
        return [self.tokens[(start * 509 + at) % len(self.tokens)] for at in range(count)]

    def open(self, *prompts: list[int], loras: Sequence[int] = ()) -> Target:
        """Rows that have read their prompts, each added as a request that arrives is. A prompt is read once. loras: of
        each row, as ``KVCache.loras``."""
        pool = self.model.new_pool(len(prompts), _capacity(max(map(len, prompts))), None)  # as a batch has it
        pool.clear()
        for prompt, lora in zip(prompts, loras or [0] * len(prompts), strict=True):
            pool.join(self._read(prompt, lora), len(prompt))
        return Target.of(self.model, pool)

    def _read(self, prompt: list[int], lora: int) -> KVCache:
        known = self._known.get((lora, *prompt))
        if known is None:
            target = Target(self.model, 1, _capacity(len(prompt)))
            target.cache.loras = [lora]
            feed(target, [prompt], [0], head=False)
            known = self._known[lora, *prompt] = target.cache
        return known

    def read(
        self,
        target: Target,
        tokens: Sequence[Sequence[int]],
        lengths: Sequence[int],
        parent: Sequence[Sequence[int]] | None = None,
    ) -> list[Read]:
        """One pass over a tree a row, lines without parent: what each row's nodes gave."""
        given, length = (torch.tensor(x, device=self.device) for x in (tokens, lengths))
        line = chain_parent(given.shape[1], self.device).expand_as(given)
        above = line if parent is None else torch.tensor(parent, device=self.device)
        capacity = target.cache.capacity
        span = min(capacity, round_up(max(lengths) + given.shape[1], 64))
        pack = self.device.type == "cpu"  # as in a batch: no accelerator leaves padding out
        plan = layout(above, length, capacity, span=span, pack=pack, is_line=parent is None)
        out = target.forward(given, plan, taps=self.taps)
        assert out.logits is not None
        taps = out.logits.new_zeros(*out.logits.shape[:2], 0) if out.taps is None else out.taps
        # A pass may reuse what the one before it returned.
        return [Read(a.float().clone(), b.clone()) for a, b in zip(out.logits, taps, strict=True)]

    def line(self, prompt: list[int], tokens: Sequence[int], lora: int = 0) -> Read:
        """Plain decoding: one node a pass."""
        target, found = self.open(prompt, loras=(lora,)), []
        begun = perf_counter()
        for at, token in enumerate(tokens):
            found += self.read(target, [[token]], [len(prompt) + at])
        self.seconds_a_pass = (perf_counter() - begun) / len(tokens)
        return Read(torch.cat([one.logits for one in found]), torch.cat([one.taps for one in found]))


def _capacity(length: int) -> int:
    """Slots of a row, after whose text all that is read here has room."""
    return round_up(length + 2 * max(WIDTHS) + len(TREE), 64)


def _of(read: Read, nodes: Sequence[int]) -> Read:
    return Read(read.logits[list(nodes)], read.taps[list(nodes)])


def _moved(length: int, path: Sequence[int]) -> tuple[list[int], list[int]]:
    """Slots (src, dst) of a path that is kept."""
    return [length + node for node in path], [length + at for at in range(len(path))]


def _comparisons(model: CausalModel, taps: Sequence[int]) -> Iterator[tuple[str, Read, Read]]:
    """(name, a way of reading, plain decoding) of the same tokens."""
    reader, room = _PassReader(model, taps), model.spec.max_positions
    prompt = reader.some(0, max(2, min(PROMPT, room // 4)))
    length = len(prompt)
    first = reader.line(prompt, reader.some(1, 3))
    most = min(room - length - 1, max(4, int(BUDGET_S / reader.seconds_a_pass)), max(WIDTHS))
    tokens = [*reader.some(1, 3), *reader.some(2, most)][:most]
    plain = reader.line(prompt, tokens)
    yield "the same pass twice", first, _of(plain, range(3))
    has_trees = not model.spec.chains_only
    nodes = reader.some(3, len(TREE))
    after = reader.some(4, 3)
    second = reader.line(prompt, [*(nodes[node] for node in SECOND), *after])
    if has_trees and most >= len(TREE):
        yield from _trees(reader, prompt, nodes, after, second)
    yield from _lines(reader, prompt, tokens, plain)
    if most >= len(TREE):
        yield from _batches(reader, prompt, nodes, after, second, has_trees=has_trees)
    yield from _prefixes(reader, prompt)
    block = reader.open(prompt)
    for width in (width for width in WIDTHS if width <= most):  # each undoes the one before it
        yield f"blocks of {width}", reader.read(block, [tokens[:width]], [length])[0], _of(plain, range(width))
    if room >= LONG + 64:
        yield from _long(reader, nodes, has_trees=has_trees)


def _trees(
    reader: _PassReader, prompt: list[int], nodes: list[int], after: list[int], second: Read
) -> Iterator[tuple[str, Read, Read]]:
    length = len(prompt)
    target = reader.open(prompt)
    tree = reader.read(target, [nodes], [length], [TREE])[0]
    for path, plain in ((FIRST, None), (SECOND, second), (THIRD, None)):
        line = plain or reader.line(prompt, [nodes[node] for node in path])
        yield "a tree", _of(tree, path), _of(line, range(len(path)))
    src, dst = _moved(length, SECOND)
    target.commit(torch.tensor([src], device=reader.device), torch.tensor([dst], device=reader.device))
    kept = reader.read(target, [after], [length + len(SECOND)])[0]
    yield "a kept branch", kept, _of(second, range(len(SECOND), len(SECOND) + len(after)))


def _lines(reader: _PassReader, prompt: list[int], tokens: list[int], plain: Read) -> Iterator[tuple[str, Read, Read]]:
    length, target = len(prompt), reader.open(prompt)
    count = min(4, len(tokens) - 2)
    wrong = reader.some(6, count)
    reader.read(target, [[tokens[0], *wrong]], [length])  # all guesses but the pending token are rejected
    rest = tokens[1 : 1 + count]
    yield "rejected guesses", reader.read(target, [rest], [length + 1])[0], _of(plain, range(1, 1 + len(rest)))


def _batches(
    reader: _PassReader, prompt: list[int], nodes: list[int], after: list[int], second: Read, *, has_trees: bool
) -> Iterator[tuple[str, Read, Read]]:
    """Rows of several lengths and trees, some with adapters where there are any; two stay, in another order."""
    # Five nodes with an adapter: native passes take its term of four at once.
    others, one = [prompt[: len(prompt) - 5], prompt[: len(prompt) // 3]], reader.some(8, 5)
    path = [nodes[node] for node in SECOND]
    mine, above = (nodes, TREE) if has_trees else ([*path, *(4 * [0])], (-1, 0, 1, 2, -1, -1, -1, -1))
    place = SECOND if has_trees else range(len(path))
    loras = [0, min(1, len(reader.model.loras)), len(reader.model.loras)]
    target = reader.open(prompt, *others, loras=loras)
    lengths = [len(prompt), *map(len, others)]
    lone = [-1] * (len(TREE) - 1)
    parents = [above, (-1, 0, 1, 2, 3, *lone[4:]), (-1, *lone)]
    rows = reader.read(target, [mine, [*one, *(3 * [0])], [one[0], *(7 * [0])]], lengths, parents)
    yield "a batch", _of(rows[0], place), _of(second, range(len(path)))
    name = "an adapter in a batch" if loras[1] else "a batch"
    yield name, _of(rows[1], range(5)), reader.line(others[0], one, loras[1])
    src, dst = _moved(lengths[0], list(place))
    held = [[lengths[row] + at for at in range(len(path))] for row in (1, 2)]
    moves = (torch.tensor([first, *held], device=reader.device) for first in (src, dst))
    target.commit(*moves)
    target.keep(torch.tensor([2, 0]), max(lengths) + len(TREE))
    rest = reader.read(target, [[one[1], one[2]], after[:2]], [lengths[2] + 1, lengths[0] + len(path)])
    yield "rows that move", rest[1], _of(second, range(len(path), len(path) + 2))
    yield "rows that move", rest[0], _of(reader.line(others[1], one, loras[2]), (1, 2))


def _prefixes(reader: _PassReader, prompt: list[int]) -> Iterator[tuple[str, Read, Read]]:
    """A text that begins as one that was kept."""
    if len(prompt) < PROMPT:
        return
    read = prompt[:SHARED]
    row, store = reader.open(read).cache, PrefixStore(1 << 40)
    saved = row.save(len(read)) if isinstance(row, RecurrentCache) else None
    store.add(read, row, (), None, None, None if saved is None else {saved.position: saved})
    text = [*read, *reader.some(9, 4)]
    found = store.find(text, ())
    if found is None:  # no recurrent state is kept so early
        return
    target = Target.of(reader.model, reader.model.new_cache(1, round_up(len(text) + 64, 64)))
    found[0].copy_into(target.cache, found[1])
    feed(target, [text[found[1] :]], [found[1]], head=False)
    tokens = reader.some(10, 3)
    yield "a kept prefix", reader.read(target, [tokens], [len(text)])[0], reader.line(text, tokens)


def _long(reader: _PassReader, nodes: list[int], *, has_trees: bool) -> Iterator[tuple[str, Read, Read]]:
    """After a long text, where it is read in time."""
    begun = perf_counter()
    reader.open(reader.some(11, LONG // 8))
    if (perf_counter() - begun) * 8 > BUDGET_S:
        return
    text = reader.some(13, LONG)
    path = [nodes[node] for node in SECOND]
    given, above, place = (nodes, [TREE], SECOND) if has_trees else (path, None, range(len(path)))
    tree = reader.read(reader.open(text), [given], [len(text)], above)[0]
    yield f"after {LONG} tokens", _of(tree, place), reader.line(text, path)
