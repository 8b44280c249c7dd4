"""What evaluation harnesses ask of a model: log likelihoods of texts, and texts up to a stop; on an engine that guesses.

Scores are of one pass over the known text and guess nothing; texts are the engine's. With an exact verifier both are those
of plain decoding, so a benchmark's figure says nothing of the speculation but how long it took.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.core.errors import ConfigError, PromptError
from foretell.core.noise import derive_seed
from foretell.core.params import MAX_SEED, SamplingParams
from foretell.core.settings import check_keys
from foretell.engine.engine import Engine, Request
from foretell.engine.request.request import token_ids

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names that tasks give the most tokens to write, the strongest first."""
LEAST = ("min_new_tokens", "min_tokens")
"""Names that tasks give the fewest tokens to write, the strongest first."""
SAMPLED = ("top_k", "top_p", "min_p", "repetition_penalty")
KNOWN = (*LENGTHS, *LEAST, *SAMPLED, "until", "do_sample", "temperature", "seed")


@dataclass(frozen=True)
class Score:
    """A continuation's."""

    logprob: float  # natural log of its probability after its context
    is_greedy: bool  # whether every token of it is a most probable one


class Evaluation:
    """An engine, as evaluation harnesses call it: texts in, figures out, in the order of the requests."""

    def __init__(
        self,
        engine: Engine,
        *,
        batch_size: int = 1,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        seed: int = 0,
    ) -> None:
        """batch_size: texts written together. max_length: most tokens of context and output; None: the model's.
        max_gen_toks: most tokens to write where a task says nothing. add_bos_token: None follows the tokenizer.
        seed: of sampled texts; each has its own, of it. Raises ConfigError."""
        if engine.tokenizer is None:
            raise ConfigError("evaluations are of texts, and this engine has no tokenizer: load it with one")
        longest = engine.model.spec.max_positions
        if max_length is not None and not 2 <= max_length <= longest:
            raise ConfigError(f"max_length = {max_length} must be 2 to {longest}, the model's context")
        for name, value in (("batch_size", batch_size), ("max_gen_toks", max_gen_toks)):
            if value < 1:
                raise ConfigError(f"{name} = {value} must be at least 1")
        self.engine, self.tokenizer = engine, engine.tokenizer
        self.batch_size, self.max_gen_toks, self.seed = batch_size, max_gen_toks, seed
        self.max_length = max_length or longest
        self.add_bos_token = add_bos_token

    # -- tokens ----------------------------------------------------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        """A name that no other model's tokenizer has, as a part of a file's."""
        named = getattr(self.engine.tokenizer, "name_or_path", "")  # that of a GGUF file is empty
        return str(named or self.engine.model.spec.name).replace("/", "__")

    @property
    def prefix_token_id(self) -> int:
        """What a text without context follows: the tokenizer's first token of a text, else the model's end token."""
        bos = getattr(self.tokenizer, "bos_token_id", None)
        if bos is not None:
            return int(bos)
        return self.end_token_id

    @property
    def end_token_id(self) -> int:
        """The model's. Raises ConfigError where it has none."""
        known = self.engine.model.spec.eos_token_ids
        if not known:
            raise ConfigError(
                f"{self.engine.model.spec.name!r} has neither a first nor an end token to put before texts"
            )
        return known[0]

    def encode(self, text: str, *, special: bool | None = None) -> list[int]:
        """Token ids. special: with the tokenizer's own special tokens, but never a second first token, where a chat
        template has written it; None: as ``add_bos_token`` says."""
        if special is None:
            special = self.add_bos_token is not False
        ids = token_ids(text, self.tokenizer, add_special_tokens=special)
        if self.add_bos_token and special and ids[:1] != [self.prefix_token_id]:
            ids.insert(0, self.prefix_token_id)
        return ids

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of a context and of what follows it, cut where they are one text; spaces belong to what follows."""
        if not context:
            ids, first = self.encode(continuation, special=False), self.prefix_token_id
            return (ids[:1], ids[1:]) if ids[:1] == [first] else ([first], ids)
        bare = context.rstrip()
        if bare:
            context, continuation = bare, context[len(bare) :] + continuation
        whole, before = self.encode(context + continuation), self.encode(context)
        return before, whole[len(before) :]

    # -- scores ----------------------------------------------------------------------------------------------------

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[Score]:
        """The score of each (context, continuation). Contexts too long lose their beginning. Raises PromptError where a
        continuation alone is too long."""
        return self.token_scores([self.pair(*pair) for pair in pairs])

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """The log likelihood of each whole text. Each token is scored once; texts beyond the context in windows, each as
        long as the context."""
        found, jobs = [0.0] * len(texts), list[tuple[list[int], list[int]]]()
        owners: list[int] = []
        for index, text in enumerate(texts):
            for window in windows(self.encode(text), self.prefix_token_id, self.max_length):
                jobs.append(window)
                owners.append(index)
        values: list[list[float]] = [[] for _ in texts]
        for owner, score in zip(owners, self.token_scores(jobs), strict=True):
            values[owner].append(score.logprob)
        for index, parts in enumerate(values):
            found[index] = math.fsum(parts)
        return found

    def token_scores(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """The score of each (context, continuation) of token ids."""
        for _, ids in pairs:
            if len(ids) > self.max_length:
                raise PromptError(
                    f"a text of {len(ids)} tokens is to be scored at once; this model takes {self.max_length}: cut it"
                )
        # The last token is never read, so a text may have one more than the context.
        wholes = [[*context, *ids][-(self.max_length + 1) :] for context, ids in pairs]
        order = sorted(range(len(pairs)), key=wholes.__getitem__)  # texts that begin alike are read once
        found: list[Score] = [Score(0.0, True)] * len(pairs)
        scored = self.engine.score([wholes[at] for at in order], num_logprobs=1)
        for at, pieces in zip(order, scored, strict=True):
            count = len(pairs[at][1])
            last = pieces[len(pieces) - count :]
            values = [piece.logprob for piece in last if piece.logprob is not None]
            best = all(piece.logprob == piece.top_logprobs[0][1] for piece in last)
            found[at] = Score(math.fsum(values), best)
        return found

    # -- texts -----------------------------------------------------------------------------------------------------

    def texts(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[tuple[int, str]]:
        """(index, text) of each (context, settings) as it is done. Raises ConfigError for a setting that is not known."""
        made = []
        for index, (context, given) in enumerate(requests):
            params = self.params(given, index)
            ids = self.encode(context) or [self.prefix_token_id]
            room = self.max_length - params.max_new_tokens
            if room < 1:
                raise ConfigError(
                    f"max_gen_toks = {params.max_new_tokens} leaves nothing of {self.max_length} tokens for the prompt"
                )
            made.append(Request(ids[-room:], params))
        for index, completion in self.engine.completions(made, batch_size=self.batch_size):
            yield index, completion.text

    def params(self, given: Mapping[str, Any], index: int) -> SamplingParams:
        """A task's settings as the engine's. index: of the request, for its seed."""
        check_keys(given, KNOWN, "in the task's generation settings")
        until = given.get("until") or []
        stop = [until] if isinstance(until, str) else list(until)
        limits = [given[name] for name in LENGTHS if given.get(name) is not None]
        minima = [given[name] for name in LEAST if given.get(name) is not None]
        temperature = given.get("temperature")
        does_sample = given.get("do_sample")
        if does_sample is None:
            does_sample = bool(temperature)
        settings = {name: given[name] for name in SAMPLED if given.get(name) is not None}
        base = self.seed if given.get("seed") is None else int(given["seed"])
        return SamplingParams(
            **settings,
            temperature=float(1.0 if temperature is None else temperature) if does_sample else 0.0,
            min_new_tokens=int(minima[0]) if minima else 0,
            max_new_tokens=int(limits[0]) if limits else self.max_gen_toks,
            stop=tuple(text for text in stop if text),
            seed=derive_seed(base, index) & MAX_SEED,
        )


def windows(ids: Sequence[int], first: int, max_length: int) -> Iterator[tuple[list[int], list[int]]]:
    """(context, tokens to score) that cover a text, each token scored once; all but the first have as much context as a
    window of max_length read tokens leaves."""
    known = [first, *ids]
    done = 1  # of known, that have been scored or need not be
    while done < len(known):
        stop = min(done + max_length, len(known))
        start = max(0, stop - max_length - 1)
        yield known[start:done], known[done:stop]
        done = stop
