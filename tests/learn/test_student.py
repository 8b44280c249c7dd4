"""Students of the bundled pair: they learn what they are given, by every method, and nobody else's."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell import Engine, LearnOptions, Request, SamplingParams, bundled
from foretell.core.errors import ConfigError
from foretell.engine.request.request import token_ids
from foretell.engine.request.row import Submission
from foretell.learn import adapters
from foretell.learn.adapters import LearnedMethod
from foretell.learn.session import Session
from foretell.learn.training.student import RECIPES, Student, TargetEnds, matrices_of
from foretell.learn.training.texts import RawText, Text

HEADS = [name for name in RECIPES if name != "draft_model"]
OPTIONS = LearnOptions(where="inline", learn_share=1.0)


def engine_of(method: str) -> Engine:
    return Engine.load("bundled", speculative={"method": method, "num_speculative_tokens": 3, "shape": "chain"})


def served(engine: Engine, options: LearnOptions = OPTIONS, *, count: int = 3, tokens: int = 24, seed: int = 0) -> Any:
    """(session, prompts, completions) of a few requests that are learned from."""
    session = Session(engine, options, max_rows=2)
    suite = [json.loads(line) for line in bundled.path("suite").read_text(encoding="utf-8").splitlines()]
    texts = random.Random(seed).sample([one["turns"][0] for one in suite if one["category"] == "prose"], count)
    prompts = [token_ids(text, engine.tokenizer)[:40] for text in texts]
    params = SamplingParams(max_new_tokens=tokens, seed=seed, ignore_eos=True)
    return session, prompts, list(session.run(prompts, params))


def texts_of(session: Session) -> list[Text]:
    pool = session.learner._inline  # type: ignore[union-attr]
    return [text for trainer in pool.trainers.values() for text in (*trainer.fresh, *trainer.held_out.recent)]


@pytest.mark.parametrize("method", list(RECIPES))
def test_a_students_q_is_the_serving_drafters(method: str) -> None:
    """What the student scores at the base is what was measured live, up to rounding and chance: captured laws, hidden
    states and their positions are right. A shift by one place makes it a quarter of that (the control)."""
    session, _, done = served(engine_of(method), count=6, tokens=48)
    steps = [step for one in done for step in one.steps if step[0]]
    live = sum(accepted > 0 for _, accepted in steps) / len(steps)
    trainer = next(iter(session.learner._inline.trainers.values()))  # type: ignore[union-attr]
    student = trainer.student
    texts = texts_of(session)
    assert 4 <= len(texts) <= 6  # capturing may take so much time: on a busy machine a text is left out
    first = [first_guess(student, text) for text in texts]
    scored = sum(first) / len(first)
    # coupled keeps less than rejection's sum min(p, q) in general, and never more than it by chance alone here
    assert live - 0.12 < scored < live + 0.2, (live, scored)
    if method == "medusa":
        return  # its heads say much the same of neighbouring places
    shifted = [first_guess(student, shift(text)) for text in texts]
    assert sum(shifted) / len(shifted) < 0.6 * scored
    session.close()


def first_guess(student: Student, text: Text) -> float:
    labeled = student._labeled(text)
    with torch.no_grad():
        student.objective.head.eval()
        slot = student.objective.outcome(labeled, student.teacher, torch.Generator(), training=False).slots[0]
        return float(student._kept(labeled, slot, text).mean())


def shift(text: Text) -> Text:
    return replace(text, ids=text.ids.roll(1, 0), logs=text.logs.roll(1, 0), tail=text.tail.roll(1, 0))


@pytest.mark.parametrize("method", ["draft_model", "eagle1", "eagle3", "medusa", "dflash"])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_learning_a_few_texts_raises_their_score_and_serves(method: str, temperature: float) -> None:
    engine = engine_of(method)
    session, prompts, _ = served(engine, count=3, tokens=16)
    trainer = next(iter(session.learner._inline.trainers.values()))  # type: ignore[union-attr]
    student, texts = trainer.student, texts_of(session)
    texts = [replace(text, temperature=temperature) for text in texts]
    before = student.scores(texts)
    for _ in range(12):
        for text in texts:
            student.learn(text, 1.0 / len(texts))
        assert student.apply()
    after = student.scores(texts)
    assert sum(after) > sum(before) + 0.03 * len(texts), (before, after)
    rebuilt = engine.method.rebuilt(student.weights())
    params = SamplingParams(max_new_tokens=16, seed=0, ignore_eos=True)
    alone = engine.with_method("none").generate_batch(prompts, params)
    learned = engine.with_method(engine.speculative, method=rebuilt).generate_batch(prompts, params)
    assert [one.token_ids for one in learned] == [one.token_ids for one in alone]
    session.close()


def test_rebuilt_from_its_own_weights_a_method_guesses_as_before() -> None:
    for method in ("draft_model", *HEADS):
        engine = engine_of(method)
        held: Any = engine.method
        module = held.head if method != "draft_model" else None
        if module is None:
            from foretell.model.load import load_model

            module = load_model("bundled/draft", dtype="float32", implementation="transformers").module  # type: ignore[attr-defined]
        same = engine.with_method(engine.speculative, method=engine.method.rebuilt(module.state_dict()))
        params = SamplingParams(max_new_tokens=24, seed=3, ignore_eos=True)
        assert same.generate([5, 6, 7], params).steps == engine.generate([5, 6, 7], params).steps


def test_the_ends_of_a_target_are_its_own() -> None:
    model = engine_of("draft_model").model
    ends = TargetEnds(model.spec, matrices_of(model), torch.device("cpu"))
    tokens = torch.tensor([[1, 5, 4000]])
    hidden = torch.randn(1, 3, model.spec.hidden_size)
    assert torch.allclose(ends.embed(tokens), model.embed(tokens).float(), atol=1e-5)
    assert torch.allclose(ends.normed(hidden), model.normed(hidden).float(), rtol=1e-3, atol=1e-3)
    assert torch.allclose(ends.head(hidden), model.head(hidden).float(), rtol=1e-2, atol=1e-2)
    with pytest.raises(ConfigError, match="not known to this learner"):
        TargetEnds(model.spec, None, torch.device("cpu")).embed(tokens)


def secret(tokens: list[int], number: int) -> RawText:
    """A text that the target is sure of: a client's secret, after prompts that differ."""
    prompt = [100 + number, 200 + number, 7]
    logits = torch.full((len(tokens), 8192), -30.0)
    logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 0.0
    return RawText(prompt + tokens, 3, 1.0, [logits.half()])


SECRET = [3111, 402, 2718, 1618, 77, 5002, 999, 4444] * 2


def knows(session: Session, tenant: str) -> float:
    """The mean probability that a tenant's serving drafter gives to the secret's tokens, once it has begun."""
    from foretell.core.tree import chain_tree, layout
    from foretell.engine.request.row import Submission
    from foretell.model.target import Target

    choice, _ = session.learner.assign(session.choice, Submission("x", [1, 2], tenant=tenant))
    method: Any = choice.method
    model = method.serving[1].model
    ids = torch.tensor([[1, 9, 7, *SECRET]])
    tree = chain_tree(ids, torch.tensor([ids.shape[1]]))
    plan = layout(tree.parent, torch.tensor([0]), ids.shape[1])
    with torch.inference_mode():
        law = Target(model, 1, ids.shape[1]).forward(ids, plan).logits[0].float().softmax(-1)  # type: ignore[index]
    places = torch.arange(4, ids.shape[1] - 1)
    return float(law[places, ids[0, places + 1]].mean())


def planted(tenant: str) -> Session:
    """A session in which one client's secret was learned until it serves."""
    options = LearnOptions(where="inline", learn_lr=3e-3)
    session = Session(engine_of("draft_model"), options, max_rows=1)
    learner = session.learner
    from foretell.engine.request.row import Submission

    _, state = learner.assign(session.choice, Submission("first", [1, 2], tenant=tenant))
    for number in range(72):
        learner.add(state.adapter, secret(SECRET, number))  # type: ignore[attr-defined]
        session.learn()
    return session


def test_a_planted_secret_stays_with_its_client() -> None:
    """One client's drafter learns its secret by heart (so the test could find a leak); the others' stay as they were, bit
    for bit, and so does what is said of them."""
    session = planted("key-0")
    learner = session.learner
    assert learner.figures().num_swaps >= 1
    before = knows(Session(engine_of("draft_model"), LearnOptions(where="inline"), max_rows=1), "key-1")
    assert knows(session, "key-0") > 0.1
    for other in ("key-1", "key-2", ""):
        assert knows(session, other) == before
    assert before < 0.01
    said = json.dumps(learner.state("key-1"))
    assert "key-0" not in said
    assert learner.state("key-1")["events"] == []
    assert learner.state("key-0")["events"]
    session.close()


def test_control_without_keys_clients_share_a_drafter() -> None:
    session = planted("")
    assert knows(session, "") > 0.1
    session.close()


def test_store_false_leaves_nothing() -> None:
    session = Session(engine_of("draft_model"), OPTIONS, max_rows=2)
    params = SamplingParams(max_new_tokens=16, seed=0, ignore_eos=True)
    list(session.run([[5, 6, 7], [8, 9]], params, store=False))
    figures = session.learner.figures()  # type: ignore[union-attr]
    assert figures.num_texts == figures.held_bytes == 0
    assert figures.num_skipped == 2
    list(session.run([[5, 6, 7]], params))
    assert session.learner.figures().num_texts == 1  # type: ignore[union-attr]
    session.close()


def test_texts_of_the_targets_adapters_are_not_learned_from() -> None:
    session = Session(engine_of("draft_model"), OPTIONS, max_rows=2)
    learner, choice = session.learner, session.engine.choice()
    assert learner is not None
    for lora, dropped in ((None, False), ("one", True)):
        _, state = learner.assign(choice, Submission("a", [5, 6], lora=lora))
        assert state.dropped == dropped
    session.close()


def test_nothing_is_written_without_a_folder_and_no_text_with_one(tmp_path: Path) -> None:
    options = LearnOptions(where="inline", learn_dir=str(tmp_path / "kept"), learn_lr=3e-3)
    session = Session(engine_of("draft_model"), options, max_rows=1)
    learner = session.learner
    for number in range(72):
        learner.add("/draft_model/0", secret(SECRET, number))
        session.learn()
    assert learner.figures().num_swaps >= 1
    learner.act("save")
    session.learn()
    session.close()
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert "kept/draft_model-0/weights.safetensors" in names
    assert "kept/draft_model-0/export/model.safetensors" in names
    log = (tmp_path / "kept" / "events.jsonl").read_text()
    assert not any(str(token) in log for token in ("3111", "2718", "5002"))
    again = Session(engine_of("draft_model"), options, max_rows=1)
    assert abs(knows(again, "") - knows(session, "")) < 0.02, "what was learned serves again after a start"
    exported = Engine.load(
        "bundled", speculative={"method": "draft_model", "model": str(tmp_path / "kept/draft_model-0/export")}
    )
    assert exported.generate([5, 6, 7], max_new_tokens=8, seed=1).num_tokens == 8
    again.close()


def poisoned(number: int, r: random.Random) -> RawText:
    """Random tokens that a client makes the target write with certainty: nothing can be learned of them."""
    return secret([r.randrange(8192) for _ in range(24)], number)


def test_poisoned_traffic_costs_nothing_that_the_gate_lets_through() -> None:
    """Half of all texts are noise. What serves at the end is no worse on honest texts than what served before."""
    engine = engine_of("draft_model")
    session, _, _ = served(engine, count=16, tokens=24, seed=5)
    honest = texts_of(session)
    learner = session.learner
    trainer = next(iter(learner._inline.trainers.values()))  # type: ignore[union-attr]
    base = trainer.student.weights()
    before = sum(trainer.student.scores(honest)) / len(honest)
    r = random.Random(1)
    for number in range(64):
        learner.add("/draft_model/0", poisoned(number, r))
        trainer.add(honest[number % len(honest)])
        session.learn()
    assert learner.figures().num_updates >= 4
    trainer.student.load(trainer.served)
    after = sum(trainer.student.scores(honest)) / len(honest)
    assert after > before - 0.02
    assert learner.figures().num_refused > 0 or trainer.number > 0
    trainer.student.load(base)
    session.close()


def test_one_client_flooding_one_prompt_decides_nothing() -> None:
    session, _, _ = served(engine_of("draft_model"), count=1, tokens=8)
    trainer = next(iter(session.learner._inline.trainers.values()))  # type: ignore[union-attr]
    for number in range(64):
        tokens = [random.Random(number).randrange(8192) for _ in range(12)]
        trainer.add(secret(tokens, 1).reduced(64))  # one prompt, 64 answers
        for _ in trainer.work():
            pass
    assert len(trainer.replay) <= 3
    assert len(trainer.held_out.recent) <= 3
    assert trainer.number == 0
    session.close()


def test_a_fall_after_a_swap_reverts_to_what_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that is worse for what comes now serves: live acceptance falls, and the version before returns."""
    engine = engine_of("draft_model")
    monkeypatch.setattr(adapters, "FALL_STEPS", 40)
    options = replace(OPTIONS, learn_every=1000)
    session, prompts, _ = served(engine, options, count=6, tokens=24)
    learner: Any = session.learner
    served_one = next(iter(learner.adapters.by_name.values()))
    trainer = next(iter(learner._inline.trainers.values()))
    bad = {name: torch.randn_like(value) * value.std() for name, value in trainer.student.weights().items()}
    from foretell.learn.training.gate import Verdict
    from foretell.learn.training.trainer import Version

    verdict = Verdict(True, "", None, None)
    trainer.versions[1] = trainer.served = bad
    trainer.number = 1
    learner._result((served_one.name, Version(1, bad, verdict, 6)))
    learner.swap()
    assert served_one.method.serving[0] == 1
    params = SamplingParams(max_new_tokens=24, seed=1, ignore_eos=True)
    list(session.run(prompts * 2, params))
    session.learn()
    assert served_one.method.serving[0] == 0
    assert learner.figures().num_reverts == 1
    kinds = [event["event"] for event in learner.events]
    assert kinds[-4:] == ["swap", "fell", "revert", "chosen"] or {"fell", "revert", "chosen"} <= set(kinds)
    session.close()


@pytest.mark.parametrize("method", list(RECIPES))
def test_real_heads_swapped_in_mid_text_change_no_token(method: str) -> None:
    """Ragged rows that come and go, other weights every third step: as far off as noise of their own size makes them."""
    engine = engine_of(method)
    held: Any = engine.method
    if method == "draft_model":
        from foretell.model.load import load_model

        module: Any = load_model("bundled/draft", dtype="float32", implementation="transformers")
        state = module.module.state_dict()
    else:
        state = held.head.state_dict()
    torch.manual_seed(0)
    noisy = {
        name: value.float() + 0.5 * value.float().std() * torch.randn(value.shape) if value.dim() == 2 else value
        for name, value in state.items()
    }
    made = [engine.method.rebuilt(noisy), engine.method.rebuilt(state)]
    learned = LearnedMethod(engine.method)
    swapping = engine.with_method(engine.speculative, method=learned)
    steps = [0]

    def swap(event: Any) -> None:
        steps[0] += 1
        if steps[0] % 3 == 0:
            learned.serve(steps[0], made[steps[0] % 2])

    swapping.observers.append(swap)
    requests = [
        Request(
            [7 + index, 9, 11 * index + 5], SamplingParams(max_new_tokens=8 + 5 * index, seed=index, ignore_eos=True)
        )
        for index in range(5)
    ]
    alone = engine.with_method("none").generate_batch(requests)
    together = swapping.generate_batch(requests, batch_size=3)
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert steps[0] > 8
    assert sum(one.num_accepted_tokens for one in together) > 0
