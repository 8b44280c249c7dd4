"""The target's answers to the prompts of a file, made once and kept: what a drafter learns from."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from accelerate import PartialState

from foretell import Engine
from foretell.core.errors import ConfigError
from foretell.core.journal import first_difference
from foretell.model.identity import target_hash
from foretell.model.target import CausalModel
from foretell.train import responses as r

SHORT = 4
"""Tokens of an answer that there is something to learn from."""
SURE = 64
"""Answers after which it is seen that most are short: the others are not waited for."""
UNSAID = {"raw": False}
"""What files of answers do not say that are older than the option."""
Bar = Callable[[Path], AbstractContextManager[Callable[[int, int, int], None]]]
"""From the journal's path to a bar that takes (prompts done, prompts, tokens written)."""


@dataclass(frozen=True)
class AskedPrompt:
    """How prompts are answered."""

    limit: int | None  # only the first prompts of the file
    max_new_tokens: int
    temperatures: Sequence[float]  # in turn
    seed: int
    raw: bool = False  # texts stay as they are, whatever model it is


def answers_of(
    data: str,
    target: str,
    model: CausalModel,
    out: Path,
    asked: AskedPrompt,
    *,
    max_length: int,
    dtype: str | None,
    device: str,
    bar: Bar,
    notice: Callable[[str], None],
    max_short_share: float,
) -> r.Responses:
    """The target's answers: read, if they are there (a file of them, or those of a run to be resumed), or written now.

    data: prompts, or a file of answers. target: its name, for the engine that answers; model: the same, for its hash.
    max_length: tokens of prompt and answer together. They are kept beside the folder ``out``, as
    OUT.responses.safetensors, so that another method can learn from them; while they are made, in OUT.responses.jsonl, so
    that the same call goes on after a kill. notice is called with lines about prompts and answers. Raises
    ConfigError, also where more than max_short_share of the answers are too short to learn from.
    """
    mine, ends = target_hash(model), model.spec.eos_token_ids
    if data.endswith(".safetensors"):
        found = r.Responses.load(data)
        found.check_target(mine, name=f"--data {data}")
        return _judged(found, ShortAnswers(ends, max_short_share, data), notice)
    kept = out.with_name(f"{out.name}.{r.FILE}")
    made_with = {
        "source_sha256": r.file_sha256(data) if Path(data).is_file() else None,
        **asdict(asked),
        "temperatures": list(asked.temperatures),
        "target_hash": mine,
    }
    state = PartialState(cpu=device == "cpu")
    with state.main_process_first():  # one process writes them, the others read
        if kept.exists():
            return _judged(_kept(kept, made_with), ShortAnswers(ends, max_short_share, str(kept)), notice)
        engine = Engine.load(target, speculative="none", device=device, dtype=dtype)
        most = asked.max_new_tokens
        prompts = r.read_prompts(
            data, engine, limit=asked.limit, max_new_tokens=most, max_length=max_length, raw=asked.raw, notice=notice
        )
        journal = kept.with_suffix(".jsonl")
        journal.parent.mkdir(parents=True, exist_ok=True)
        with bar(journal) as progress:
            found = r.regenerate(
                engine, prompts, temperatures=asked.temperatures, max_new_tokens=most, seed=asked.seed,
                progress=progress, journal=journal, source=data, source_sha256=made_with["source_sha256"],
                judge=ShortAnswers(ends, max_short_share, str(journal)).early,
            )  # fmt: skip
        found = replace(found, metadata={**found.metadata, "limit": asked.limit, "raw": asked.raw})
        found.save(kept)
        journal.unlink()
        skipped = found.metadata["num_skipped"]
        if skipped:
            notice(
                f"{skipped} of {len(prompts)} prompts of {data} were left out: no room for an answer of {most} tokens"
            )
    return _judged(found, ShortAnswers(ends, max_short_share, str(kept)), notice)


def _judged(found: r.Responses, short: "ShortAnswers", notice: Callable[[str], None]) -> r.Responses:
    for index in range(len(found)):
        short.count(found.response(index))
    short.end(notice)
    return found


class ShortAnswers:
    """Counts answers that are too short to learn from. One that the limit on tokens has cut is none."""

    def __init__(self, end_token_ids: Collection[int], most: float, kept: str) -> None:
        """most: the largest share of them. kept: the file that the answers are in."""
        self.ends, self.most, self.kept = frozenset(end_token_ids), most, kept
        self.num = self.num_short = self.num_empty = 0

    def count(self, tokens: Sequence[int]) -> None:
        """One answer's tokens."""
        said = next((at for at, token in enumerate(tokens) if token in self.ends), len(tokens))
        self.num += 1
        self.num_short += said < SHORT and (said < len(tokens) or said == 0)
        self.num_empty += said == 0

    def early(self, tokens: Sequence[int]) -> None:
        """The same while more are to come, which are not waited for where most are short. Raises ConfigError."""
        self.count(tokens)
        if self.num >= SURE and self.num_short > max(self.most, 0.5) * self.num:
            self._refuse()

    def end(self, notice: Callable[[str], None]) -> None:
        """Tell how many there were. Raises ConfigError where they were too many."""
        if self.num_short > self.most * self.num:
            self._refuse()
        if self.num_short:
            notice(f"{self._told}: there is little to learn from them")

    @property
    def _told(self) -> str:
        return f"{self.num_short} of {self.num} answers have fewer than {SHORT} tokens ({self.num_empty} are empty)"

    def _refuse(self) -> None:
        raise ConfigError(
            f"{self._told}, more than a share of {self.most:g}, and a drafter learns little from them. An instruct model "
            "ends its answer to a bare text at once: give conversations ('messages'), or leave out --raw; a base model "
            "needs texts to go on with. --max-short-share 1 trains all the same. The answers are kept in "
            f"{self.kept}: delete it, or give another --out, to have the prompts answered again"
        )


def _kept(file: Path, made_with: dict[str, object]) -> r.Responses:
    """The answers of an earlier run. Raises ConfigError where they were made otherwise."""
    found = r.Responses.load(file)
    difference = first_difference({key: found.metadata.get(key, UNSAID.get(key)) for key in made_with}, made_with)
    if difference is None:
        return found
    key, old, new = difference
    raise ConfigError(
        f"{file} holds {len(found)} answers that were made with {key} = {old!r}, and now {key} is {new!r}: give it "
        "as --data to learn from it, or another --out, or delete it"
    )
