"""An EAGLE-3 head for a chat model, from prompts to weights on one CUDA card, in minutes.

    python -m recipes.card_head --target FILE.gguf --out FOLDER --minutes 5 --own 6000 [--prompts FILE ...]

The target writes prompts (``recipes.chat_prompts``) and answers them in batches of a thousand rows and more; what the
head reads of it (three layers and the last hidden state) is kept on the card while it writes, so that no text is read a
second time. Then the trainer of ``foretell train`` runs on what is kept. Batches of this width give up what the engine
promises, the same text in any batch; a drafter does not care.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foretell.core.params import SamplingParams
from foretell.engine.engine import Engine, Request
from foretell.heads.stored_outputs import Kept, KeptBatch, LinearHead, rounded
from foretell.heads.teacher import LabeledBatch, Teacher, TeacherBatch
from foretell.methods.medusa.head import head_weight
from foretell.model.identity import target_hash
from foretell.train.methods import prepare
from foretell.train.own_prompts import own_questions
from foretell.train.recipes import three_layers
from foretell.train.responses import pack, read_prompts
from foretell.train.trainer import Report, Trainer
from recipes.chat_prompts import passage_questions

RESERVE = 36 * 2**30 if torch.cuda.is_available() else 0
"""Bytes that are left for training."""
WINDOW = 6144
"""Prompts that are sorted by length together: an end for want of time leaves a fair part of all."""
PREFILL = 65_536
"""Positions that are read in one pass."""
COMPACT = 0.8
"""Rows that ended leave the batch when no more than this share of its rows is left."""


@dataclass(frozen=True)
class Written:
    """A text of the target: prompt and answer, and what was kept on the way."""

    ids: list[int]
    start: int  # of the answer
    ended: bool  # by itself
    kept: Kept | None


class Writer:
    """A Llama- or Qwen2-type module of ``transformers`` that writes for many rows at once. Rows are padded on the left, so
    that all of them write into one slot: a step's keys and values are one slice of the cache."""

    def __init__(self, module: Any, end_ids: Sequence[int], layers: Sequence[int]) -> None:
        """layers: whose outputs are kept."""
        self.body, self.head, self.config = module.model, module.lm_head, module.config
        self.layers, self.device = tuple(layers), module.lm_head.weight.device
        c = self.config
        self.kv = c.num_key_value_heads
        self.dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        self.ends = torch.tensor(sorted(end_ids), device=self.device)

    def rows(self, slots: int, share: float = 0.55) -> int:
        """How many rows of that many slots a share of the free memory holds."""
        c = self.config
        states = (len(self.layers) + 1) * c.hidden_size
        each = slots * (2 * c.num_hidden_layers * self.kv * self.dim + states) * 2 + 6 * c.vocab_size
        return max(1, int(share * self.free / each))

    @property
    def free(self) -> int:
        """Bytes of the device's memory."""
        if self.device.type != "cuda":
            return 2**31
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    def run(
        self, tokens: Tensor, cache: list[tuple[Tensor, Tensor]], at: int, pad: Tensor, states: Tensor | None
    ) -> Tensor:
        """Last hidden states [B, n, H] before the norm of tokens [B, n] in slots at to at + n - 1; the first pad [B] slots
        of each row are empty. states [B, n, (k + 1) H]: where the kept layers' outputs and the last are written."""
        rows, count = tokens.shape
        slot = torch.arange(at + count, device=self.device)
        place = (slot[None, at:] - pad[:, None]).clamp_(min=0)
        x = self.body.embed_tokens(tokens)
        cos, sin = (turn[:, None] for turn in self.body.rotary_emb(x, place))
        seen = (slot[None] >= pad[:, None])[:, None, None]  # [B, 1, 1, S]
        if count > 1:
            seen = seen & (slot[None] <= slot[at:, None])[None, None]
            seen = seen | (slot[None] == slot[at:, None])[None, None]  # an empty slot sees itself: no row of nothing
        bias = torch.zeros(seen.shape, dtype=x.dtype, device=self.device).masked_fill_(~seen, -torch.inf)
        hidden = x.shape[-1]
        for index, (layer, (keys, values)) in enumerate(zip(self.body.layers, cache, strict=True)):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (
                project(normed).view(rows, count, -1, self.dim).transpose(1, 2)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q, k = (each * cos + _half(each) * sin for each in (q, k))
            keys[:, :, at : at + count], values[:, :, at : at + count] = k, v
            known, said = keys[:, :, : at + count], values[:, :, : at + count]
            group = q.shape[1] // self.kv
            if count == 1:
                # One query of each head: the queries of a group are the rows of one product.
                near = q.view(rows, self.kv, group, self.dim) * self.dim**-0.5
                share = (near @ known.transpose(2, 3) + bias).softmax(-1, dtype=torch.float32).to(x.dtype)
                mixed = (share @ said).view(rows, 1, -1)
            else:
                known, said = (each.repeat_interleave(group, 1) for each in (known, said))
                mixed = F.scaled_dot_product_attention(q, known, said, attn_mask=bias)
                mixed = mixed.transpose(1, 2).reshape(rows, count, -1)
            x = x + attention.o_proj(mixed)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            if states is not None and index in self.layers:
                part = self.layers.index(index)
                states[:, :, part * hidden : (part + 1) * hidden] = x
        if states is not None:
            states[:, :, len(self.layers) * hidden :] = x
        return x

    @torch.inference_mode()
    def batch(
        self,
        prompts: Sequence[list[int]],
        temperatures: Sequence[float],
        top_p: float,
        most: int,
        seed: int,
        *,
        keep: bool,
    ) -> list[Written]:
        """Answers of at most ``most`` tokens. keep: with ``Written.kept``."""
        count, lengths = len(prompts), [len(prompt) for prompt in prompts]
        width = max(lengths)
        c = self.config
        shape = (count, self.kv, width + most, self.dim)
        kind = self.head.weight.dtype
        cache = [tuple(torch.empty(shape, dtype=kind, device=self.device) for _ in "kv") for _ in self.body.layers]
        pad = width - torch.tensor(lengths)
        tokens = torch.zeros(count, width + most, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, width - len(prompt) : width] = torch.tensor(prompt)
        tokens, pad = tokens.to(self.device), pad.to(self.device)
        num_states = (len(self.layers) + 1) * c.hidden_size if keep else 0
        states = torch.zeros(count, width + most, num_states, dtype=kind, device=self.device)
        best = torch.zeros(count, width + most, dtype=torch.int32, device=self.device)
        heat = torch.tensor(temperatures, dtype=torch.float32, device=self.device)
        generator = torch.Generator(self.device).manual_seed(seed)
        last = torch.empty(count, 1, c.hidden_size, dtype=kind, device=self.device)
        each = max(1, PREFILL // width)
        for begin in range(0, count, each):
            part = slice(begin, begin + each)
            own = [(keys[part], values[part]) for keys, values in cache]
            into = states[part, :width] if keep else None
            last[part] = self.run(tokens[part, :width], own, 0, pad[part], into)[:, -1:]
        live = torch.arange(count, device=self.device)
        length = torch.full((count,), width + most, device=self.device)
        done = torch.zeros(count, dtype=torch.bool, device=self.device)
        for slot in range(width, width + most):
            logits = self.head(self.body.norm(last[:, 0])).float()
            first = logits.argmax(-1)
            best[live, slot - 1] = first.int()
            chosen = torch.where(heat[live] == 0, first, _draw(logits, heat[live], top_p, generator))
            tokens[live, slot] = chosen
            over = torch.isin(chosen, self.ends) & ~done
            length[live[over]] = slot + 1
            done |= over
            if slot + 1 == width + most:
                break
            if (slot - width) % 16 == 15:
                left = (~done).nonzero()[:, 0]
                if not len(left):
                    break
                if len(left) <= COMPACT * len(live):
                    cache = [tuple(part[left] for part in layer) for layer in _drained(cache)]
                    live, done, chosen = live[left], done[left], chosen[left]
            into = states.new_empty(len(live), 1, num_states) if keep else None
            last = self.run(chosen[:, None], cache, slot, pad[live], into)
            if into is not None:
                states[live, slot] = into[:, 0]
        del cache
        slot_of = torch.arange(width + most, device=self.device)
        own = (slot_of >= pad[:, None]) & (slot_of < length[:, None])
        flat, flat_best = states[own], best[own]  # one block of memory for all texts
        del states
        size = len(self.layers) * c.hidden_size
        hidden = flat[:, size:].clone()
        taps = torch.cat([rounded(part) for part in flat[:, :size].split(PREFILL)]) if keep else flat
        found, at = [], 0
        for row, (end, ids) in enumerate(zip(length.tolist(), tokens.tolist(), strict=True)):
            begin = width - lengths[row]
            part = slice(at, at := at + end - begin)
            kept = Kept(taps[part], hidden[part], flat_best[part]) if keep else None
            found.append(Written(ids[begin:end], lengths[row], end < width + most, kept))
        return found

    def all(
        self,
        prompts: Sequence[list[int]],
        temperatures: Sequence[float],
        *,
        top_p: float,
        most: int,
        seed: int,
        keep: bool,
    ) -> Iterator[tuple[int, Written]]:
        """Every prompt's answer with its number, prompts of like length together."""
        for first in range(0, len(prompts), WINDOW):
            window = range(first, min(first + WINDOW, len(prompts)))
            order = sorted(window, key=lambda index: len(prompts[index]))
            while order:
                rows = self.rows(len(prompts[order[-1]]) + most)
                part, order = order[-rows:], order[:-rows]
                begun = time.perf_counter()
                made = self.batch(
                    [prompts[i] for i in part], [temperatures[i] for i in part], top_p, most, seed + part[0], keep=keep
                )
                total = sum(len(text.ids) - text.start for text in made)
                print(f"  {len(part)} rows, {total} tokens, {total / (time.perf_counter() - begun):.0f}/s", flush=True)
                yield from zip(part, made, strict=True)


def _half(x: Tensor) -> Tensor:
    near, far = x.chunk(2, -1)
    return torch.cat((-far, near), -1)


def _drained(cache: list[Any]) -> Iterator[Any]:
    """The layers, each let go when the next is taken: a cut of all of them is not held beside all of them."""
    while cache:
        yield cache.pop(0)


def _draw(logits: Tensor, heat: Tensor, top_p: float, generator: torch.Generator) -> Tensor:
    """[B] a token of each row at temperatures [B], of the most probable ones that hold top_p together."""
    p = (logits / heat.clamp(min=1e-3)[:, None]).softmax(-1)
    if top_p < 1:
        low, high = torch.zeros_like(heat), p.amax(-1)
        for _ in range(16):  # the greatest bound whose tokens hold enough
            middle = (low + high) / 2
            enough = (p * (p >= middle[:, None])).sum(-1) >= top_p
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        p = p * (p >= low[:, None])
    return (p / torch.empty_like(p).exponential_(generator=generator)).argmax(-1)


class Author:
    """What ``recipes.chat_prompts`` asks of an engine, by a ``Writer``."""

    def __init__(self, engine: Engine, writer: Writer) -> None:
        self.engine, self.writer = engine, writer
        self.model, self.tokenizer, self.chat_prompt = engine.model, engine.tokenizer, engine.chat_prompt

    def completions(self, requests: Sequence[Request], *, batch_size: int) -> Iterator[tuple[int, Any]]:
        """(number, completion) of requests that have one sampling."""
        if not requests:
            return
        assert self.tokenizer is not None
        prompts = [
            self.tokenizer.encode(each.prompt, add_special_tokens=False)
            if isinstance(each.prompt, str)
            else each.prompt
            for each in requests
        ]
        params: SamplingParams = requests[0].params
        heat = [params.temperature] * len(prompts)
        for number, text in self.writer.all(
            prompts, heat, top_p=params.top_p, most=params.max_new_tokens, seed=params.seed or 0, keep=False
        ):
            answer = text.ids[text.start :]
            said = self.tokenizer.decode(answer, skip_special_tokens=True)
            yield number, SimpleNamespace(text=said, finish_reason="stop" if text.ended else "length", token_ids=answer)


class KeptTeacher(Teacher):
    """The target's outputs on texts that it wrote here; other texts it reads."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._kept: dict[tuple[int, ...], Kept] = {}
        self._head = LinearHead(model, head_weight(model))

    def keep(self, text: Written) -> None:
        """To be found again by its tokens."""
        assert text.kept is not None
        self._kept[tuple(text.ids)] = text.kept

    def label(self, batch: TeacherBatch, taps: Sequence[int]) -> Any:
        """See ``Teacher.label``. taps: those of the ``Writer``."""
        rows = [tuple(ids[:n]) for ids, n in zip(batch.tokens.tolist(), batch.length.tolist(), strict=True)]
        if not all(row in self._kept for row in rows):
            return super().label(batch, taps)
        return self._labeled(batch, [self._kept[row] for row in rows])

    def _labeled(self, batch: TeacherBatch, kept: list[Kept]) -> LabeledBatch:
        return KeptBatch.of(batch, kept, self._head)


def prompts_of(author: Any, args: argparse.Namespace) -> list[list[int]]:
    """Token ids of prompts in random order: those that the target writes, and those of the files."""
    journal = args.out / "questions"
    questions = own_questions(author, args.own, args.seed, journal.with_suffix(".own"))
    questions += passage_questions(author, args.passages, args.seed, journal.with_suffix(".passages"))
    found = [author.chat_prompt([{"role": "user", "content": question}]) for question in sorted(set(questions))]
    for file in args.prompts:
        found += read_prompts(file, author.engine)
    random.Random(f"card/{args.seed}").shuffle(found)
    return [prompt for prompt in found if len(prompt) <= args.prompt_tokens]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--name", help="of the target, in the head's record")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, help="of training", default=5.0)
    parser.add_argument("--own", type=int, default=6000, help="user turns that the model writes; about half are kept")
    parser.add_argument(
        "--passages", type=int, default=1500, help="texts that the model writes, each with a task about it"
    )
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="further prompts, e.g. of recipes.prompts")
    parser.add_argument("--prompt-tokens", type=int, default=448, help="longer prompts are left out")
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--answer-minutes", type=float, default=3.0, help="after which no batch of answers is begun")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], help="key=value for training, e.g. intermediate_size=4096")
    args = parser.parse_args()
    begun = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - begun:6.1f} s] {text}", flush=True)

    args.out.mkdir(parents=True, exist_ok=True)
    engine = Engine.load(args.target, device=args.device, dtype="bfloat16", implementation="transformers")
    spec = engine.model.spec
    module: Any = engine.model.module  # type: ignore[attr-defined]
    layers = three_layers(spec.num_layers)
    writer = Writer(module.eval(), spec.eos_token_ids, layers)
    say(f"{spec.name}, {spec.dtype}, layers {layers}, end tokens {spec.eos_token_ids}")
    chats = prompts_of(Author(engine, writer), args)
    say(f"{len(chats)} prompts")
    teacher, texts = KeptTeacher(engine.model), []
    answers = writer.all(
        chats, [float(number % 2) for number in range(len(chats))], top_p=1.0, most=args.answer_tokens, seed=args.seed + 1,
        keep=True,
    )  # fmt: skip
    until = time.perf_counter() + 60 * args.answer_minutes
    for _, text in answers:
        if text.kept is not None and len(text.ids) > text.start + 1:
            teacher.keep(text)
            texts.append((text.ids, text.start))
        if time.perf_counter() > until or (len(texts) % 256 == 0 and writer.free < RESERVE):
            say("no time or memory for more answers")
            break
    made_by = {
        "target": spec.name, "target_hash": target_hash(engine.model), "implementation": spec.implementation,
        "dtype": "bfloat16", "seed": args.seed, "temperatures": [0.0, 1.0], "max_new_tokens": args.answer_tokens,
        "num_prompts": len(chats), "source": "written by the target", "num_skipped": len(chats) - len(texts),
    }  # fmt: skip
    responses = pack(texts, made_by)
    responses.save(args.out / "responses.safetensors")
    say(f"{len(texts)} answers, {responses.num_tokens} tokens")
    given: dict[str, Any] = {
        "minutes": args.minutes, "precision": "bfloat16", "optimizer": "muon", "num_slots": 5, "alone": 0.2,
        "batch_tokens": 12_288, "max_length": args.prompt_tokens + args.answer_tokens, "eval_every": 0,
        "held_out": 0.02, "divergence": "lk_hybrid", "eval_tokens": 40_000, "checkpoint_every": 10**6,
        "draft_vocab_size": 16_384, "save_dtype": "bfloat16", "layer_ids": list(layers), "seed": args.seed,
    }  # fmt: skip
    given.update({key: json.loads(value) for key, _, value in (each.partition("=") for each in args.set)})
    prepared = prepare("eagle3", engine.model, responses, given, target_name=args.name or args.target)
    identity = {"method": "eagle3", "options": prepared.options, "target": args.name or spec.name,
                "target_hash": made_by["target_hash"], "target_dtype": "bfloat16"}  # fmt: skip
    shown = [0.0]

    def progress(report: Report) -> None:
        if time.perf_counter() - shown[0] > 10:
            shown[0] = time.perf_counter()
            slots = " ".join(f"{loss:.3f}" for loss in report.slot_losses if loss is not None)
            say(f"step {report.step}, {report.share:.0%}, {report.tokens_per_second:.0f} tokens/s, losses {slots}")

    trainer = Trainer(
        prepared.objective, teacher, responses, args.out / "head", prepared.config, identity=identity,
        save=prepared.save, finish=prepared.finish, progress=progress,
    )  # fmt: skip
    final = trainer.run()
    say(json.dumps(final.as_dict()))


if __name__ == "__main__":
    main()
