"""Labels for a judge, mined from tasks whose answers can be checked (AutoJudge, 2504.20039, section 3.1).

The target answers a prompt greedily; its outcome a* is what an answer is compared by. The draft model reads the answer
along. At the first place where its own choice is another token, that token is put in, and the target goes on greedily
from there. If the outcome is a* again, the token is *unimportant*, and the new answer replaces the old one. If it is
another outcome, or none, the token is *important*, and the answer is kept. The search goes on after this place.

a* is the target's own outcome, right or wrong: the judge must keep the target's results.

Later swaps never change what stands before an earlier one, so one text a prompt, its last, and the list of swaps hold
the context of every label.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

import torch

from foretell.core.errors import ConfigError
from foretell.core.jsontext import parse_json
from foretell.core.params import SamplingParams
from foretell.core.tree import chain_tree, layout
from foretell.engine.engine import Engine, Request
from foretell.model.target import CausalModel, Target

Outcome = Callable[[int, str], str | None]
"""(number of the prompt, text of an answer) -> what answers are compared by; None where there is none."""


@dataclass(frozen=True)
class Swap:
    """One token of the draft's, tried in the place of the text's own."""

    position: int  # in the answer, from 0
    token: int  # the draft's
    important: bool  # the outcome changed


@dataclass(frozen=True)
class Mined:
    """All labels of one prompt."""

    index: int  # number of the prompt
    prompt: list[int]
    answer: list[int]  # at the end: with the unimportant swaps in it
    outcome: str | None  # a*; None: the target's own answer has no outcome, and nothing was swapped
    swaps: list[Swap] = field(default_factory=list)  # by position

    def line(self) -> str:
        """As JSON."""
        packed = {**asdict(self), "swaps": [[swap.position, swap.token, int(swap.important)] for swap in self.swaps]}
        return json.dumps(packed)

    @classmethod
    def of(cls, line: str) -> "Mined":
        """What ``line`` wrote. Raises ValueError, KeyError or TypeError for anything else."""
        packed = parse_json(line)
        swaps = [Swap(int(position), int(token), bool(important)) for position, token, important in packed["swaps"]]
        return cls(int(packed["index"]), packed["prompt"], packed["answer"], packed["outcome"], swaps)


def read_labels(path: Path) -> list[Mined]:
    """The labels of a file, by prompt. A last line that was cut short is left out. Raises ConfigError."""
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file; expected the labels that were mined")
    whole = path.read_text(encoding="utf-8").split("\n")[:-1]  # after the last newline stands a line cut short, or none
    try:
        return [Mined.of(line) for line in whole]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: a line is not a label of a judge ({error}); expected the file that was mined"
        ) from None


class _Work:
    """One prompt being mined: its next request to the target, and the result of the last one."""

    def __init__(self, index: int, prompt: list[int]) -> None:
        self.index, self.prompt = index, prompt
        self.answer: list[int] | None = None
        self.outcome: str | None = None
        self.swaps: list[Swap] = []
        self.border = 0  # places before it are final
        self.likely: list[int] = []  # the draft's choice at every place of the answer
        self.tried: list[int] | None = None  # the beginning of the answer that the target continues next

    def mined(self) -> Mined:
        return Mined(self.index, self.prompt, self.answer or [], self.outcome, self.swaps)

    def aim(self) -> bool:
        """Find the next mismatch; False where there is none."""
        assert self.answer is not None
        for place in range(self.border, len(self.answer)):
            if self.likely[place] != self.answer[place]:
                self.tried = [*self.answer[:place], self.likely[place]]
                return True
        return False

    def settle(self, answer: list[int], outcome: str | None) -> bool:
        """Take the target's answer; True where the text changed."""
        if self.tried is None:
            self.answer, self.outcome = answer, outcome
            return outcome is not None
        place = len(self.tried) - 1
        important = outcome != self.outcome
        self.swaps.append(Swap(place, self.tried[-1], important))
        self.border = place + 1
        if not important:
            self.answer = answer
        return not important


class Miner:
    """Mines many prompts at once: in each round the target answers one request of every open prompt."""

    def __init__(self, engine: Engine, draft: CausalModel, outcome: Outcome, *, max_new_tokens: int = 128) -> None:
        """engine: the target, plain or with an exact rule (its text is greedy), with a tokenizer. draft: of the same
        vocabulary. max_new_tokens bounds an answer, the end token included."""
        if engine.tokenizer is None:
            raise ConfigError("an outcome is read from text: give the engine a tokenizer")
        if not engine.verifier.exact:
            raise ConfigError(
                f"verifier {engine.verifier.name!r} is lossy: labels are mined from the target's own text"
            )
        self.engine, self.draft, self.outcome, self.max_new_tokens = engine, draft, outcome, max_new_tokens

    def mine(self, prompts: Iterator[tuple[int, list[int]]], *, batch_size: int = 64) -> Iterator[Mined]:
        """Labels of the prompts (number, token ids), in the order in which they are done."""
        works: list[_Work] = []
        while True:
            works += [_Work(*prompt) for prompt in islice(prompts, batch_size - len(works))]
            if not works:
                return
            changed = []
            for work, answer in zip(works, self._answers(works), strict=True):
                text = self.engine.tokenizer.decode(answer, skip_special_tokens=True)  # type: ignore[union-attr]
                if work.settle(answer, self.outcome(work.index, text)):
                    changed.append(work)
            self._read_along(changed)
            going = []
            for work in works:
                if work.outcome is not None and work.aim():
                    going.append(work)
                else:
                    yield work.mined()
            works = going

    def _answers(self, works: Sequence[_Work]) -> list[list[int]]:
        """The target's greedy answers, each with the given beginning."""
        ends = set(self.engine.model.spec.eos_token_ids)
        starts = [work.tried or [] for work in works]
        asked = [
            index
            for index, start in enumerate(starts)
            if len(start) < self.max_new_tokens and not (start and start[-1] in ends)
        ]
        requests = [
            Request(
                [*works[index].prompt, *starts[index]],
                SamplingParams(temperature=0.0, seed=0, max_new_tokens=self.max_new_tokens - len(starts[index])),
            )
            for index in asked
        ]
        answers = list(starts)
        for index, found in zip(
            asked, self.engine.generate_batch(requests, batch_size=max(1, len(asked))), strict=True
        ):
            answers[index] = [*starts[index], *found.token_ids]
        return answers

    @torch.inference_mode()
    def _read_along(self, works: Sequence[_Work], *, at_once: int = 16) -> None:
        """Let the draft read the answers, and note its choice at every place."""
        device = self.draft.spec.device
        for first in range(0, len(works), at_once):
            part = works[first : first + at_once]
            texts = [[*work.prompt, *(work.answer or [])] for work in part]
            longest = max(map(len, texts))
            length = torch.tensor([len(text) for text in texts], device=device)
            tokens = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=device)
            plan = layout(chain_tree(tokens, length).parent, torch.zeros_like(length), longest)
            hidden = Target(self.draft, len(part), longest).forward(tokens, plan, head=False).hidden
            for row, work in enumerate(part):
                start = len(work.prompt) - 1  # the place whose logits are the answer's first token
                logits = self.draft.logits(hidden[row : row + 1, start : len(texts[row]) - 1])
                work.likely = logits[0].argmax(-1).tolist()


def mine(
    engine: Engine,
    draft: CausalModel,
    prompts: Sequence[Sequence[int]],
    outcome: Outcome,
    out: Path,
    *,
    max_new_tokens: int = 128,
    batch_size: int = 64,
    progress: Callable[[int, int, Mined], bool | None] | None = None,
) -> list[Mined]:
    """Mine prompts and write a line each to ``out``, a stopped run is continued there. Returns all labels there.

    progress is called with (prompts done, prompts in all, labels of the last one); if it returns True, mining ends.
    Labels do not depend on batch_size, but for ties that a pass of another shape rounds otherwise. Raises ConfigError.
    """
    known: list[Mined] = []
    if out.exists():
        known = read_labels(out)
        for mined in known:
            if mined.index >= len(prompts) or mined.prompt != list(prompts[mined.index]):
                raise ConfigError(f"{out} holds labels of other prompts (number {mined.index}): give another file")
        _cut(out)
    done = {mined.index for mined in known}
    left = ((index, list(prompt)) for index, prompt in enumerate(prompts) if index not in done)
    miner = Miner(engine, draft, outcome, max_new_tokens=max_new_tokens)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as stream:
        for mined in miner.mine(left, batch_size=batch_size):
            known.append(mined)
            stream.write(mined.line() + "\n")
            stream.flush()
            if progress is not None and progress(len(known), len(prompts), mined):
                break
    return known


def _cut(path: Path) -> None:
    """Drop an incomplete line of a stopped run."""
    content = path.read_bytes()
    path.write_bytes(content[: content.rfind(b"\n") + 1])
