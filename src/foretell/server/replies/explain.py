"""The answer of ``/v1/foretell/explain``: steps taken apart."""

from typing import Literal

from pydantic import Field

from foretell.server.replies.common import Reply


class ExplainedRunner(Reply):
    """A token that could follow a place of the text."""

    token: int
    text: str
    p: float = Field(description="The target's probability of it.")
    q: float | None = Field(description="The drafter's; null where it has none, or other requests shared the step.")
    time_p: float | None = Field(description="When it arrives in the target's race; null: never, or there is none.")
    time_q: float | None = Field(description="... in the drafter's, under the same noise.")


class ExplainedGuess(Reply):
    """A node of the tree of guesses."""

    node: int
    parent: int = Field(description="The node that it follows; 0 is the last token of the text.")
    text: str
    how: str = Field(description="How it was drawn: fixed, iid, without replacement or coupled.")
    p: float
    q: float | None
    reach: float = Field(description="The chance that it is kept, before anything was drawn.")
    kept: bool


class ExplainedPlace(Reply):
    """A place of the text at which the target decided."""

    node: int
    after: str = Field(description="The text of the node.")
    runners: list[ExplainedRunner] = Field(description="The most probable first.")
    guesses: list[str]
    guess_tokens: list[int] = Field(description="Theirs: several tokens can have one text.")
    winner: str = Field(description="The token that was written here.")
    winner_token: int
    was_guessed: bool
    accept: float | None = Field(description="Where a weighted coin decides: the chance of the first guess.")


class ExplainedWords(Reply):
    """The step in words, each term introduced where it first stands."""

    before: list[str]
    guess: list[str]
    check: list[str]
    verdicts: list[str] = Field(description="One for each place.")
    kept: str
    result: list[str]


class ExplainedStepReply(Reply):
    """A decode step, taken apart."""

    number: int = Field(description="From 1.")
    text: str = Field(description="The end of the text before the step.")
    method: str
    verifier: str
    exact: bool
    is_race: bool
    temperature: float
    guesses: list[ExplainedGuess]
    places: list[ExplainedPlace]
    num_kept: int
    emitted: list[str]
    stop_uniform: float = Field(description="The random number by which rules with a coin choose where to stop.")
    seconds_draft: float
    seconds_target: float
    seconds_rest: float
    words: ExplainedWords


class ExplainReply(Reply):
    """The first steps of a text."""

    object: Literal["foretell.explanation"]
    model: str
    seed: int = Field(description="With it the same text comes again.")
    chosen: int = Field(description="Index of the step to show first: some of its guesses were kept, some not.")
    steps: list[ExplainedStepReply]
