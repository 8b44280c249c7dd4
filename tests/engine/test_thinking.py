"""Thoughts along paths of guesses: where they end, their budget, and what holds the answer behind them."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell import ConfigError, Engine, Request, SamplingParams
from foretell.engine.structured.thinking import ThinkingProcessor
from foretell.engine.structured.thoughts import (
    FAMILIES,
    Family,
    Phase,
    Thoughts,
    ThoughtState,
    family_named,
    family_of,
    read,
    rest_of,
)  # fmt: skip
from tests.engine.harness import EOS, VOCAB, ToyTokenizer, outcome, table, tree_engine
from tests.stress import size

THE, ZERO, ONE, X, Y, Z, BLANK = 6, 16, 17, 18, 19, 20, 3
TOY = Family(
    "toy", ("the",), ("the",), {"before": (("the", "thought"),), "thought": (("01", "answer"),), "answer": ()},
    ("the",), "01",
)  # fmt: skip
"""A thought is opened by one token and closed by two."""
PROMPT = [0, 13, 4]


class Toy(ToyTokenizer):
    def get_vocab(self) -> dict[str, int]:
        return {piece.decode("latin-1"): index for index, piece in enumerate(self.pieces)}


class Cycle:
    """An answer of x, y, z in turn, at least three of them."""

    error, left_out = "", ()

    def begins(self, token_ids: Sequence[int]) -> bool:
        return all(token == (X, Y, Z)[at % 3] for at, token in enumerate(token_ids))

    def stop(self, reason: str) -> None:
        self.error = reason

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        made = torch.full_like(logits, -torch.inf)
        good = self.begins(ids.tolist())
        if good:
            made[(X, Y, Z)[len(ids) % 3]] = logits[(X, Y, Z)[len(ids) % 3]]
        if not good or len(ids) >= 3:
            made[EOS] = logits[EOS]
        return made


def minder(start: Phase, budget: int | None, *, held: bool = False, num_prompt: int = len(PROMPT)) -> ThinkingProcessor:
    thoughts = Thoughts(TOY, Toy())
    return ThinkingProcessor(thoughts, num_prompt, start, budget, Cycle() if held else None, (EOS,))


def allowed(processor: Any, output: Sequence[int]) -> set[int]:
    logits = torch.linspace(-1, 1, VOCAB, dtype=torch.float64)
    made = processor(torch.tensor([*PROMPT, *output]), logits.clone())
    kept = torch.nonzero(made > -torch.inf)[:, 0]
    assert torch.equal(made[kept], logits[kept])
    return set(kept.tolist())


def twin(output: Sequence[int], start: Phase, budget: int | None, held: bool) -> set[int]:
    """What is permitted, by the whole text each time; of outputs all of whose tokens were."""
    texts = [ToyTokenizer().decode([token]) for token in output]
    ends, everything = {EOS}, set(range(VOCAB))
    opened = 0 if start == "thought" else None
    if start == "before" and "".join(texts).lstrip().startswith("the"):
        opened = next(at for at in range(len(texts) + 1) if "".join(texts[:at]).lstrip().startswith("the"))
    if opened is None:
        if not held:
            return everything
        answer = allowed_by_cycle(output)
        return answer | ({THE} if start == "before" and not output else set())
    closed = next((at for at in range(opened, len(texts) + 1) if "01" in "".join(texts[opened:at])), None)
    if closed is not None:
        return allowed_by_cycle(output[closed:]) if held else everything
    beyond = -1 if budget is None else len(output) - opened - budget
    if beyond >= 0:
        return {(ZERO, ONE)[beyond]}
    return everything - ends if held else everything


def allowed_by_cycle(output: Sequence[int]) -> set[int]:
    good = all(token == (X, Y, Z)[at % 3] for at, token in enumerate(output))
    return ({(X, Y, Z)[len(output) % 3]} if good else set()) | ({EOS} if not good or len(output) >= 3 else set())


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("budget", [None, 0, 1, 4])
@pytest.mark.parametrize("start", ["before", "thought", "answer"])
def test_what_is_permitted_is_a_function_of_the_path_alone(start: Phase, budget: int | None, held: bool) -> None:
    """Random trees of permitted tokens, their nodes in any order: always what the whole text says."""
    source = random.Random(f"{start} {budget} {held}")
    paths: list[list[int]] = [[]]
    for _ in range(160):
        path = source.choice(paths)
        choices = sorted(twin(path, start, budget, held) - {EOS})
        likely = [token for token in (THE, ZERO, ONE, X) if token in choices]
        if choices:
            paths.append([*path, source.choice(likely if likely and source.random() < 0.5 else choices)])
    processor = minder(start, budget, held=held)
    for _ in range(2):
        source.shuffle(paths)
        for path in paths:
            assert allowed(processor, path) == twin(path, start, budget, held), path
    assert len({len(path) for path in paths}) > 4


def side_branches(seed: int, right: Sequence[int]) -> Any:
    """Trees of any shape: the right path for a while, and branches of random tokens from any node."""

    def guess(ids: list[int], depth: int) -> list[tuple[int, int]]:
        source, done = random.Random(f"{seed} {len(ids)}"), len(ids) - len(PROMPT)
        nodes: list[tuple[int, int]] = []
        depths, rest = [0], list(right[done:])
        at = 0
        for token in rest[
            : source.randrange(min(depth, 4) + 1)
        ]:  # where the text is the right one, all of these are kept
            nodes.append((at, token))
            at = len(nodes)
            depths.append(depths[nodes[-1][0]] + 1)
        for _ in range(source.randrange(5)):
            above = source.randrange(len(depths))
            taken = {token for parent, token in nodes if parent == above}
            token = source.choice(
                [token for token in (ZERO, ONE, X, Y, THE, source.randrange(VOCAB)) if token not in taken] or [0]
            )
            if depths[above] < min(depth, 4) and token not in taken:
                nodes.append((above, token))
                depths.append(depths[above] + 1)
        return nodes

    return guess


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_text_with_and_without_guesses(temperature: float) -> None:
    """Budgets, phases and held answers, each in trees of random shape: token by token what plain decoding writes."""
    model, forced, answered = table(5, sharpness=1.0), 0, 0
    plain = Engine(model, ToyTokenizer(), speculative="none")
    for seed in range(size(6, 400)):
        start: Phase = ("before", "thought")[seed % 2]  # type: ignore[assignment]
        budget, held = (None, 0, 2, 5)[seed // 2 % 4], seed % 3 > 0
        options: dict[str, Any] = {"seed": seed, "temperature": temperature, "max_new_tokens": 24}
        expected = plain.generate(PROMPT, logits_processor=minder(start, budget, held=held), **options)
        engine = tree_engine(model, side_branches(seed, expected.token_ids), 8, tokenizer=ToyTokenizer())
        found = engine.generate(PROMPT, logits_processor=minder(start, budget, held=held), **options)
        assert outcome(found) == outcome(expected), seed
        assert found.num_draft_tokens > 0
        thoughts = Thoughts(TOY, Toy())
        count = thoughts.count(expected.token_ids, start)
        assert budget is None or count <= budget
        forced += budget is not None and count == budget > 0
        output = [token for token in expected.token_ids if token != EOS]
        states = [
            minder(start, budget)._follow(torch.tensor(output[:at]).long().numpy()) for at in range(len(output) + 1)
        ]
        if states[-1].phase == "answer" and held:
            answered += 1
            assert Cycle().begins(output[states[-1].since :])
    assert forced > 1
    assert answered > 1


def test_rows_of_a_batch_have_budgets_of_their_own() -> None:
    model = table(7, sharpness=1.0)
    requests = [
        Request(
            PROMPT,
            SamplingParams(
                seed=seed,
                max_new_tokens=16,
                logits_processor=minder("thought", budget, held=seed % 2 == 0),
                ignore_eos=True,
            ),
        )
        for seed, budget in enumerate((0, 1, 3, 8, None, 2))
    ]
    plain = Engine(model, ToyTokenizer(), speculative="none")
    expected = [plain.generate(one.prompt, one.params) for one in requests]
    engine = tree_engine(model, side_branches(3, expected[3].token_ids), 8, tokenizer=ToyTokenizer())
    made = engine.generate_batch(requests)
    assert [one.token_ids for one in made] == [one.token_ids for one in expected]
    counts = [Thoughts(TOY, Toy()).count(one.token_ids, "thought") for one in made]
    assert [counts[0], counts[1], counts[2]] == [0, 1, 3]


def test_a_forced_end_comes_though_it_is_banned() -> None:
    logits = torch.zeros(VOCAB)
    logits[ZERO] = -torch.inf
    made = minder("thought", 0)(torch.tensor(PROMPT), logits)
    assert torch.nonzero(made > -torch.inf)[:, 0].tolist() == [ZERO]


def test_who_stops_it_is_told_why() -> None:
    processor = minder("thought", None, held=True)
    processor.stop("too slow")
    assert (allowed(processor, []), processor.error) == (set(), "too slow")


# -- reading -------------------------------------------------------------------------------------------------------------


def parts_of(family: Family, start: Phase, pieces: Sequence[str]) -> dict[str, str]:
    phase, held, made = start, "", {"before": "", "thought": "", "answer": ""}
    for piece in pieces:
        phase, held, parts = read(family, phase, held, piece)
        for which, text in parts:
            made[which] += text
    for which, text in rest_of(family, phase, held):
        made[which] += text
    return made


GPT, THINK = family_named("gpt-oss"), family_named("think")
CASES: list[tuple[Family, Phase, str, str, str]] = [
    (THINK, "before", "<think>\nhm</think>\n\nHi", "\nhm", "\n\nHi"),
    (THINK, "before", " \n<think>hm</think>Hi", "hm", "Hi"),
    (THINK, "before", " Hi <think>no</think>", "", " Hi <think>no</think>"),
    (THINK, "before", "<thin", "", "<thin"),
    (THINK, "before", "<thing>", "", "<thing>"),
    (THINK, "thought", "a </thin </think>b</think>", "a </thin ", "b</think>"),
    (THINK, "thought", "a <", "a <", ""),
    (THINK, "answer", "<think>", "", "<think>"),
    (family_named("mistral"), "before", "[THINK]hm[/THINK]Hi", "hm", "Hi"),
    (family_named("seed"), "before", "<seed:think>hm</seed:think>Hi", "hm", "Hi"),
    (family_named("gemma"), "before", "<|channel>thought\nhm<channel|>Hi", "hm", "Hi"),
    (
        GPT, "before", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi", "hm", "Hi",
    ),
    (
        GPT, "before", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}", "ab", "{}",
    ),
    (GPT, "before", "<|channel|>final<|message|>Hi", "", "Hi"),
    (GPT, "before", "<|channel|>anal", "", ""),
    (GPT, "before", "Hi", "", "Hi"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "start", "text", "thought", "answer"), CASES)
def test_a_text_is_cut_the_same_however_it_comes(
    family: Family, start: Phase, text: str, thought: str, answer: str
) -> None:
    heads = set[str]()
    for seed in range(12):
        source, pieces, rest = random.Random(seed), list[str](), text
        while rest:
            size = len(rest) if seed == 0 else source.randint(1, 9)
            pieces, rest = [*pieces, rest[:size]], rest[size:]
        found = parts_of(family, start, pieces)
        heads.add(found.pop("before"))
        assert found == {"thought": thought, "answer": answer}
    assert len(heads) == 1


def test_families_are_found_by_what_templates_write() -> None:
    for family in FAMILIES:
        for sign in family.signs:
            assert family_of("{% if x %}" + sign + "{% endif %}") is family
    assert family_of("<|im_start|>{{ role }}") is None
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


@pytest.mark.parametrize(
    ("prompt", "continued", "start"),
    [
        ("<user>a<think></think><assistant>", None, "before"),
        ("<assistant><think>\n", None, "thought"),
        ("<assistant><think>\n\n</think>\n\n", None, "answer"),
        ("<assistant>a", "a", "answer"),
        ("<assistant><think>a", "<think>a", "thought"),
        ("<assistant><think>a</think>b", "<think>a</think>b", "answer"),
    ],
)
def test_where_an_output_begins(prompt: str, continued: str | None, start: str) -> None:
    assert Thoughts(THINK, Bytes()).start_of(prompt, continued=continued) == start


@pytest.mark.parametrize(
    ("name", "end", "start"),
    [
        ("seed", "<seed:think><seed:cot_budget_reflect>", "thought"),
        ("gemma", "<|turn>model\n<|channel>thought\n<channel|>", "answer"),
        ("gemma", "<|turn>model\n<|channel>thought\n", "thought"),
        ("gpt-oss", "<|start|>assistant", "before"),
        ("mistral", "[INST]a[/INST]", "before"),
    ],
)
def test_where_an_output_of_other_families_begins(name: str, end: str, start: str) -> None:
    assert Thoughts(family_named(name), Bytes()).start_of("<user>a" + end) == start


class Bytes(ToyTokenizer):
    def __init__(self) -> None:
        super().__init__([bytes([byte]) for byte in range(256)], ())

    def get_vocab(self) -> dict[str, int]:
        return {chr(byte): byte for byte in range(256)} | {"k>": 300, "k>a": 301, ">\n": 302, "</think>x": 303}


def test_a_token_that_would_hide_the_beginning_of_an_answer_is_not_permitted() -> None:
    thoughts = Thoughts(THINK, Bytes(), 303)
    assert thoughts.overrunning(ThoughtState("thought")) == []
    thoughts = Thoughts(THINK, Bytes())
    state = minder("thought", None)._states[0]
    assert thoughts.overrunning(state) == [303]
    for byte in b"</thin":
        state = thoughts.after(state, byte)
    assert thoughts.overrunning(state) == [301]
    assert thoughts.overrunning(thoughts.after(state, ord("k"))) == []


@pytest.mark.parametrize(
    ("text", "start", "count"),
    [
        ("<think>abc</think>d", "before", 3),
        ("a<</think>b", "thought", 2),
        ("a</thib", "thought", 7),
        ("a</th", "thought", 5),
        ("<think", "before", 0),
        ("ab", "answer", 0),
    ],
)
def test_tokens_of_thoughts_are_counted_without_the_marks(text: str, start: Phase, count: int) -> None:
    thoughts, state = Thoughts(THINK, Bytes()), ThoughtState(start)
    assert thoughts.count(list(text.encode()), start) == count
    for byte in text.encode():  # the slow twin
        state = thoughts.after(state, byte)
    assert state.thought + state.pending == count


def test_a_tokenizer_that_cannot_write_the_marks_is_refused() -> None:
    class Mute(ToyTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [0]

    with pytest.raises(ConfigError, match="--reasoning-parser"):
        Thoughts(THINK, Mute())
    with pytest.raises(ConfigError, match="this model cannot write the marks of thoughts, '<think>' and '</think>'"):
        Thoughts(THINK, Bytes(), ord("t"))
