"""Answers of a chat model to many prompts, and its laws at every token of them, in one go: what a draft is distilled from.

    python -m recipes.own_answers --target DIR --prompts prompts.jsonl --out FOLDER [--journal answers.jsonl] --minutes 40

A batch of hundreds of rows in plain bfloat16 torch, prompts of like length together; rows that end leave the batch. It
writes three to four times the tokens that the engine writes at its widest batch, and gives up what the engine promises:
the same text in any batch. A drafter does not care. What is kept of a law is the normed hidden state (576 numbers) and
the log of the sum over the whole vocabulary, from which the head's rows give any part of the law exactly: no product
with the target's body is needed again.

One file per batch; the same command goes on where it was killed. ``--journal``: answers that ``train.responses`` has
written already get their laws first, by one pass over each text.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoTokenizer

from foretell.model.llama.run.pack import make_linear
from recipes.process import prepare, wait_while_paused

Text = tuple[list[int], int]
"""Token ids, and where the answer begins."""


class Writer:
    """A Llama-type model for wide batches. Caches are [B, kv heads, S, head_dim] a layer."""

    def __init__(self, folder: Path) -> None:
        self.config: Any = AutoConfig.from_pretrained(folder)
        c, tensors = self.config, load_file(folder / "model.safetensors")
        self.heads, self.kv, self.dim, self.eps = (
            c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.rms_norm_eps,
        )  # fmt: skip
        self.embedding = tensors["model.embed_tokens.weight"].bfloat16()
        self.norm = tensors["model.norm.weight"].bfloat16()
        self.head = make_linear(self.embedding, None, packed=True)
        self.layers = []
        for i in range(c.num_hidden_layers):
            w = {key.removeprefix(f"model.layers.{i}."): t.bfloat16() for key, t in tensors.items() if f".{i}." in key}
            # Norms' weights go into the matrices behind them: what is left of a norm is one factor a row.
            before, behind = w["input_layernorm.weight"].float(), w["post_attention_layernorm.weight"].float()
            qkv = (torch.cat([w[f"self_attn.{x}_proj.weight"] for x in "qkv"]) * before).bfloat16()
            gate_up = (torch.cat([w["mlp.gate_proj.weight"], w["mlp.up_proj.weight"]]) * behind).bfloat16()
            packed = [make_linear(x, None, packed=True) for x in (qkv, gate_up)]
            out, down = (
                make_linear(w[x], None, packed=True) for x in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
            )
            self.layers.append((packed[0], out, packed[1], down))
        inverse = 1.0 / c.rope_parameters["rope_theta"] ** (torch.arange(0, self.dim, 2) / self.dim)
        angles = torch.arange(c.max_position_embeddings)[:, None] * inverse.repeat(2)
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def new_cache(self, rows: int, slots: int) -> list[tuple[Tensor, Tensor]]:
        """Empty keys and values."""
        shape = (rows, self.kv, slots, self.dim)
        return [(torch.zeros(shape).bfloat16(), torch.zeros(shape).bfloat16()) for _ in self.layers]

    def run(self, tokens: Tensor, cache: list[tuple[Tensor, Tensor]], at: Tensor | None, span: int) -> Tensor:
        """Normed hidden states [B, T, H] of tokens [B, T], which lie in slots 0 to T - 1, or (T = 1) in slot at [B]."""
        rows, count = tokens.shape
        x = F.embedding(tokens, self.embedding)
        group = self.heads // self.kv
        place = torch.arange(count)[None].expand(rows, -1) if at is None else at[:, None]
        cos, sin = self.cos[place][:, :, None], self.sin[place][:, :, None]  # [B, T, 1, D]
        every = torch.arange(rows)
        mask = None if at is None else (torch.arange(span) <= at[:, None])[:, None, None]  # [B, 1, 1, S]
        for (keys, values), (qkv, out, gate_up, down) in zip(cache, self.layers, strict=True):
            mixed = qkv(self.scaled(x)).view(rows, count, -1, self.dim)
            turned, v = mixed[:, :, : self.heads + self.kv], mixed[:, :, self.heads + self.kv :]
            half = torch.cat([-turned[..., self.dim // 2 :], turned[..., : self.dim // 2]], -1)
            turned = turned * cos + half * sin
            q, k = turned[:, :, : self.heads], turned[:, :, self.heads :]
            if at is None:
                keys[:, :, :count], values[:, :, :count] = k.transpose(1, 2), v.transpose(1, 2)
                seen = F.scaled_dot_product_attention(
                    q.transpose(1, 2), k.transpose(1, 2).repeat_interleave(group, 1),
                    v.transpose(1, 2).repeat_interleave(group, 1), is_causal=True,
                ).transpose(1, 2)  # fmt: skip
            else:
                keys[every, :, at], values[every, :, at] = k[:, 0], v[:, 0]
                seen = F.scaled_dot_product_attention(
                    q.view(rows, self.kv, group, self.dim), keys[:, :, :span], values[:, :, :span], attn_mask=mask
                )
            x = x + out(seen.reshape(rows, count, -1))
            gate, up = gate_up(self.scaled(x)).chunk(2, -1)
            x = x + down(F.silu(gate).mul_(up))
        return F.rms_norm(x, self.norm.shape, self.norm, self.eps)

    def scaled(self, x: Tensor) -> Tensor:
        """A norm without its weight."""
        mean = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_().div_(x.shape[-1])
        return (x * (mean + self.eps).rsqrt_()).bfloat16()

    def log_sums(self, hidden: Tensor) -> Tensor:
        """[n] float32 of normed states [n, H]: the log of the sum over the whole vocabulary. Few rows at a time stay in
        the processor's cache."""
        sums = [part.float().logsumexp(-1) for h in hidden.split(256) for part in self.head(h).split(4)]
        return torch.cat(sums)


def padded(texts: Sequence[Sequence[int]]) -> Tensor:
    """[B, T] int64, padded on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)


def chunks(lengths: Sequence[int], tokens: int = 4096) -> list[tuple[int, int]]:
    """Runs of rows of at most so many tokens with padding."""
    out, begin = [], 0
    for i in range(1, len(lengths) + 1):
        if i == len(lengths) or max(lengths[begin : i + 1]) * (i + 1 - begin) > tokens:
            out.append((begin, i))
            begin = i
    return out


@torch.no_grad()
def laws(writer: Writer, texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
    """Hidden states [n, H] bfloat16 and log-sums [n] before every token of the answers, one text after another."""
    found = []
    for begin, end in chunks([len(ids) for ids, _ in texts]):
        part = texts[begin:end]
        tokens = padded([ids for ids, _ in part])
        hidden = writer.run(tokens, writer.new_cache(len(part), tokens.shape[1]), None, 0)
        for row, (ids, start) in enumerate(part):
            found.append(hidden[row, start - 1 : len(ids) - 1])
    hidden = torch.cat(found)
    return hidden, writer.log_sums(hidden)


@torch.no_grad()
def answer(
    writer: Writer,
    prompts: Sequence[list[int]],
    temperatures: Tensor,
    most: int,
    generator: torch.Generator,
    *,
    sharpness: float = 1.0,
) -> tuple[list[Text], Tensor, Tensor]:
    """Texts with their answers, and ``laws`` of them (log-sums of the sharpened logits where sharpness is not 1).
    temperatures [B]: 0 or 1 each; 1 means 1 / sharpness."""
    ends = torch.tensor(writer.config.eos_token_id).view(-1)
    lengths = [len(prompt) for prompt in prompts]
    cache = writer.new_cache(len(prompts), max(lengths) + most)
    last = torch.empty(len(prompts), writer.config.hidden_size).bfloat16()
    for begin, end in chunks(lengths):
        tokens = padded(prompts[begin:end])
        hidden = writer.run(tokens, [(k[begin:end], v[begin:end]) for k, v in cache], None, 0)
        last[begin:end] = hidden[torch.arange(end - begin), torch.tensor(lengths[begin:end]) - 1]
    which, at, temperature = torch.arange(len(prompts)), torch.tensor(lengths), temperatures
    live = torch.ones(len(prompts), dtype=torch.bool)
    steps: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # rows, tokens, hidden states, log-sums
    for step in range(most):
        logits, uniform = writer.head(last), torch.rand(len(last), 1, generator=generator)
        pieces = []
        for part, u in zip(logits.split(4), uniform.split(4), strict=True):
            peak, best = part.max(-1)
            cumulated = (part.float() - peak[:, None]).mul_(sharpness).exp_().cumsum(-1)
            total = cumulated[:, -1:]
            drawn = torch.searchsorted(cumulated, u * total)[:, 0].clamp_max(logits.shape[-1] - 1)
            pieces.append((best, drawn, sharpness * peak + total[:, 0].log()))
        best, drawn, sums = (torch.cat(x) for x in zip(*pieces, strict=True))
        token = torch.where(temperature > 0, drawn, best)
        steps.append((which[live], token[live], last[live], sums[live]))
        live = live & ~torch.isin(token, ends)
        if step == most - 1 or not live.any():
            break
        if live.float().mean() < 0.9:  # rows that have ended run along, unread, until moving the others pays
            kept = live.nonzero()[:, 0]
            cache = [(keys[kept], values[kept]) for keys, values in cache]
            which, at, temperature, token, live = (x[kept] for x in (which, at, temperature, token, live))
        last = writer.run(token[:, None], cache, at, int(at.max()) + 1)[:, 0]
        at = at + 1
    rows, tokens, hidden, sums = (torch.cat(x) for x in zip(*steps, strict=True))
    order = torch.argsort(rows, stable=True)
    parts = tokens[order].split(torch.bincount(rows, minlength=len(prompts)).tolist())
    texts = [(prompt + part.tolist(), len(prompt)) for prompt, part in zip(prompts, parts, strict=True)]
    return texts, hidden[order], sums[order]


def keep(file: Path, texts: Sequence[Text], hidden: Tensor, sums: Tensor, temperatures: Sequence[float]) -> None:
    """Write a batch at once or not at all."""
    part = file.with_suffix(".part")
    torch.save(
        {
            "texts": texts,
            "hidden": hidden.bfloat16(),
            "sums": sums,
            "temperatures": list(temperatures),
        },
        part,
    )
    part.replace(file)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--journal", type=Path, help="answers of train.responses to the same prompts")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--most", type=int, default=160, help="tokens of an answer")
    parser.add_argument("--longest", type=int, default=640, help="tokens of a prompt")
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="odd: temperatures the other way round")
    args = parser.parse_args()
    prepare("recipes.own_answers", threads=args.threads, niceness=10)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prompts = [
        list(tokenizer.apply_chat_template(json.loads(line)["messages"], add_generation_prompt=True)["input_ids"])
        for line in args.prompts.read_text(encoding="utf-8").splitlines()
    ]
    writer, until = Writer(args.target), time.monotonic() + 60 * args.minutes
    done: set[int] = set()
    if args.journal:
        records = [json.loads(line) for line in args.journal.read_text().splitlines()[1:]]
        for begin in range(0, len(records), 500):
            part = records[begin : begin + 500]
            if len(part) < 500 and begin + 500 < len(records):
                break
            done |= {record["prompt"] for record in part}
            file = args.out / f"journal-{begin}.pt"
            if file.exists() or time.monotonic() > until:
                continue
            part.sort(key=lambda r: len(prompts[r["prompt"]]) + len(r["tokens"]))  # less padding
            texts = [(prompts[r["prompt"]] + r["tokens"], len(prompts[r["prompt"]])) for r in part]
            started = time.monotonic()
            hidden, sums = laws(writer, texts)
            keep(file, texts, hidden, sums, [float(r["prompt"] % 2) for r in part])
            print(file.name, len(sums), f"{len(sums) / (time.monotonic() - started):.0f} tokens/s", flush=True)
    left = [i for i in range(len(prompts)) if i not in done and len(prompts[i]) <= args.longest]
    left.sort(key=lambda i: len(prompts[i]))
    batches = [left[at : at + args.rows] for at in range(0, len(left), args.rows)]
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(args.seed)).tolist()
    for number in order:  # in mixed order, so that long prompts are among the first as well
        file = args.out / f"{args.prompts.stem}-{args.seed}-{number}.pt"
        if file.exists():
            continue
        if time.monotonic() > until:
            break
        wait_while_paused(args.out)
        generator, started = torch.Generator().manual_seed(1000 * args.seed + number), time.monotonic()
        chosen = batches[number]
        temperatures = torch.tensor([float((i + args.seed) % 2) for i in chosen])
        texts, hidden, sums = answer(writer, [prompts[i] for i in chosen], temperatures, args.most, generator)
        keep(file, texts, hidden, sums, temperatures.tolist())
        print(file.name, len(sums), f"{len(sums) / (time.monotonic() - started):.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
