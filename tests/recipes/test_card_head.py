"""Wide batches of ``recipes.card_head``: the engine's greedy texts, and what the teacher reads of them."""

from typing import Any

import pytest
import torch
from recipes.card_head import KeptTeacher, Writer, _draw
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from foretell import Engine, Request, SamplingParams
from foretell.heads.teacher import Teacher, TeacherBatch

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3,
}  # fmt: skip
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14], [3, 1, 4, 1, 5], [2, 7, 1], [9]]


@pytest.mark.parametrize("kind", [(LlamaForCausalLM, LlamaConfig), (Qwen2ForCausalLM, Qwen2Config)])
def test_wide_batches_write_the_engines_texts(kind: Any) -> None:
    torch.manual_seed(5)
    module = kind[0](kind[1](**SIZES, eos_token_id=None)).eval()
    engine = Engine.load(module)
    plain = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
    whole = [done.token_ids for done in engine.generate_batch([Request(prompt, plain) for prompt in PROMPTS])]
    ends = {whole[0][12], whole[2][30]}
    expected = [ids[: next((i + 1 for i, one in enumerate(ids) if one in ends), len(ids))] for ids in whole]
    lengths = sorted(map(len, expected))
    assert lengths[0] < lengths[1] < 16 < lengths[-1]  # the batch is cut while it runs
    writer, layers = Writer(module, sorted(ends), (0, 2)), (0, 2)
    found = dict(writer.all(PROMPTS, [0.0] * len(PROMPTS), top_p=1.0, most=40, seed=0, keep=True))
    assert [found[i].ids[found[i].start :] for i in range(len(PROMPTS))] == expected
    assert {found[i].ended for i in range(len(PROMPTS))} == {len(ids) < 40 for ids in expected}
    teacher = KeptTeacher(engine.model)
    for text in found.values():
        teacher.keep(text)
        size = len(text.ids)
        batch = TeacherBatch(torch.tensor([text.ids]), torch.tensor([size]), torch.tensor([text.start]))
        taps, hidden = Teacher(engine.model).states(batch, layers)
        ours = teacher.label(batch, layers)
        near = (ours.taps - taps).abs() <= taps.abs().amax(-1, keepdim=True) / 254 + 1e-3  # 64 numbers share a step
        assert near[0, : size - 1].all()
        torch.testing.assert_close(ours.hidden[0, : size - 1], hidden[0, : size - 1], rtol=1e-4, atol=1e-4)
        assert ours.best[0, text.start - 1 : size - 1].tolist() == text.ids[text.start :]


def test_draws_are_of_the_tokens_that_hold_enough() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(4000, -1)
    generator = torch.Generator().manual_seed(3)
    drawn = _draw(logits, torch.ones(4000), 0.7, generator)
    counts = torch.bincount(drawn, minlength=4)
    assert counts[2:].tolist() == [0, 0]  # the first two hold .8
    assert abs(int(counts[0]) - 2500) < 5 * (4000 * 0.625 * 0.375) ** 0.5  # false alarm 6e-7
    assert torch.bincount(_draw(logits, torch.ones(4000), 1.0, generator), minlength=4).min() > 100
