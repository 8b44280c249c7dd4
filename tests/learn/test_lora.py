"""Low-rank updates: what serves is the merged matrix, and it is what was trained."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell import LearnOptions, Request, SamplingParams
from foretell.core.errors import ConfigError
from foretell.learn.session import Session
from foretell.learn.training.lora import PARTS, LoraLinear, add_lora, merged, unwrap
from foretell.learn.training.trainer import Version
from tests.learn.test_student import SECRET, engine_of, secret
from tests.model.tiny import tiny_module

QUICK = LearnOptions(
    where="inline", learn_share=1.0, learn_lora=4, learn_lr=1e-2, learn_every=4, replay=4, held_out=3, seed=1
)
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def logits(module: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = module(input_ids=IDS, use_cache=False).logits
    return found


def test_merged_is_what_was_trained_and_the_base_stays() -> None:
    module: Any = tiny_module("llama")
    begun = {name: value.clone() for name, value in module.state_dict().items()}
    before = logits(module)
    layers = add_lora(module, 2, seed=0)
    assert torch.equal(logits(module), before), "an update begins as nothing"
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    assert trained
    assert {name.rpartition(".")[2] for name in trained} == set(PARTS)
    assert not any("lm_head" in name for name in layers), "its matrix may be the embedding's"
    for layer in layers.values():
        torch.nn.init.normal_(layer.lora_b, std=0.1)
    after = logits(module)
    assert float((after - before).abs().max()) > 1e-3
    state = module.state_dict()
    whole = merged(state, layers, {name: value for name, value in state.items() if name.rpartition(".")[2] in PARTS})
    assert whole.keys() == begun.keys()
    unwrap(module)
    assert not any(isinstance(each, LoraLinear) for each in module.modules())
    assert all(torch.equal(value, begun[name]) for name, value in module.state_dict().items())
    module.load_state_dict(whole)
    torch.testing.assert_close(logits(module), after, rtol=1e-4, atol=1e-5)


def test_a_rank_that_is_no_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="learn_lora = -1"):
        LearnOptions(learn_lora=-1)
    with pytest.raises(ConfigError, match="no linear layer"):
        add_lora(torch.nn.Embedding(3, 2), 1, seed=0)


def test_it_learns_swaps_in_mid_text_and_reverts_and_no_token_changes(tmp_path: Path) -> None:
    """The gate lets a version through, texts that are being written go on with it, and going back serves the base."""
    engine = engine_of("draft_model")
    params = SamplingParams(max_new_tokens=24, seed=0, ignore_eos=True)
    prompts = [[5, 6, 7], [100, 200, 7], [9, 10, 11]]
    requests = [Request(ids, replace(params, seed=number)) for number, ids in enumerate(prompts)]
    expected = [one.token_ids for one in engine.with_method("none").generate_batch(requests)]
    session = Session(engine, replace(QUICK, learn_dir=str(tmp_path)), max_rows=3)
    learner = session.learner
    assert learner is not None
    pool = learner._inline
    assert pool is not None
    trainer = next(iter(pool.trainers.values()))
    serving = next(iter(learner.adapters.by_name.values()))
    steps, reverted = [0], list[tuple[int, int]]()

    def between() -> None:
        steps[0] += 1
        if steps[0] == 2:  # texts have begun: learn until something is swapped in
            for number in range(24):
                learner.add("/draft_model/0", secret(SECRET, number))
            session.learn()
        if steps[0] == 8:
            before = serving.method.serving[0]
            learner.act("revert")
            reverted.append((before, serving.method.serving[0]))

    done = {one.seed: one.token_ids for one in session.run(prompts, params, between=between)}
    assert [done[number] for number in range(3)] == expected
    assert steps[0] > 8
    figures = learner.figures()
    assert figures.num_swaps >= 1
    assert figures.num_reverts == 1
    assert reverted[0][1] < reverted[0][0]
    parts, whole = trainer.student.weights(), sum(each.numel() for each in trainer.student.objective.head.parameters())
    assert {name.rpartition(".")[2] for name in parts} == set(PARTS)
    assert sum(each.numel() for each in parts.values()) < 0.1 * whole
    trainer.revert(0)
    assert all(float(value.abs().max()) == 0 for name, value in trainer.student.weights().items() if "lora_b" in name)
    session.close()  # and its folder is free
    # What was swapped in is on disk as a whole checkpoint, and serves after a start with or without LoRA.
    again = Session(engine_of("draft_model"), replace(QUICK, learn_lora=0, learn_dir=str(tmp_path)), max_rows=1)
    assert again.learner is not None
    assert [event["event"] for event in again.learner.events] == ["restored"]
    again.close()


def test_a_published_version_scores_as_what_was_trained() -> None:
    session = Session(engine_of("draft_model"), QUICK, max_rows=1)
    assert session.learner is not None
    pool = session.learner._inline
    assert pool is not None
    trainer = next(iter(pool.trainers.values()))
    found: list[Version] = []
    for number in range(24):
        trainer.add(secret(SECRET, number).reduced(64))
        found += [one for one in trainer.work() if isinstance(one, Version)]
    assert found
    text = secret(SECRET, 99).reduced(64)
    trainer.student.load(trainer.served)
    mine = trainer.student.score(text)
    plain: Any = Session(engine_of("draft_model"), replace(QUICK, learn_lora=0), max_rows=1)
    other = next(iter(plain.learner._inline.trainers.values())).student
    base = other.score(text)
    other.load(found[-1].weights)
    assert abs(other.score(text) - mine) < 1e-3
    assert mine > base + 0.1
    plain.close()
    session.close()
