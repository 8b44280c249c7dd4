"""A draft for a model with a large vocabulary: a few of the target's own layers, cut narrow, its embedding and its head.

    python -m recipes.distill_layers --target DIR --laws FOLDER --out RUN --minutes 30

A vocabulary of 49,152 tokens is more than a small model can learn from half a million tokens of text. So the draft has
none of its own: it reads the target's embedding, and its head is those rows of the target's head whose tokens the target
wrote most often. What it has of its own are the layers, which begin as copies of the target's first and last ones, each
with the neurons of its MLP that did most. The file holds these layers alone (``methods.draft_model.borrowed``).

Loss: forward KL on the chosen tokens, where the target's law is renormalised and weighs what its mass there weighs,
plus, to begin with, the distance of the normed hidden states. The target's laws come from ``recipes.own_answers``; no
pass of it is needed here. By the hash of the prompt a part of the texts is held out, as by ``train.responses``; what the
draft will keep is measured on these alone, with the target's mass outside the chosen tokens counted as lost.

It goes on where it was killed (state.pt), waits while there is a file PAUSE, and takes its minutes (of the processor, not
of the clock) from the file MINUTES.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, LlamaModel

from foretell.methods.draft_model.borrowed import save_borrowed
from recipes.own_answers import padded
from recipes.process import Stopwatch, budget_minutes, prepare, wait_while_paused
from recipes.train_target import rate

HELD_OUT = 0.05  # of the prompts
SLOTS = 4
EVERY = 25  # steps between lines of the log


@dataclass
class Data:
    """Texts, and the target's laws at each token of their answers."""

    texts: list[tuple[list[int], int]]  # token ids, and where the answer begins
    hidden: list[Tensor]  # [n, H] bfloat16 the target's normed hidden states before each token of the answer
    sums: list[Tensor]  # [n] the log of the sum over the whole vocabulary
    sampled: list[bool]  # written at temperature 1

    def take(self, index: list[int]) -> Data:
        """Some of the texts."""
        parts = ([part[i] for i in index] for part in (self.texts, self.hidden, self.sums, self.sampled))
        return Data(*parts)  # type: ignore[arg-type]

    @property
    def num_tokens(self) -> int:
        """Tokens of the answers."""
        return sum(map(len, self.sums))


def is_held_out(prompt: list[int]) -> bool:
    """As ``train.responses.Responses.split`` has it."""
    digest = hashlib.sha256(json.dumps(prompt).encode()).digest()
    return int.from_bytes(digest[:8], "big") < int(HELD_OUT * 2**64)


def read(folder: Path, longest: int) -> tuple[Data, Data]:
    """(to learn from, held out) of all files of ``recipes.own_answers``; texts cut to so many tokens."""
    every = Data([], [], [], [])
    for file in sorted(folder.glob("*.pt")):
        found, at = torch.load(file, mmap=True), 0
        for (ids, start), temperature in zip(found["texts"], found["temperatures"], strict=True):
            count = len(ids) - start
            cut = min(len(ids), longest)
            if cut > start:
                every.texts.append((ids[:cut], start))
                every.hidden.append(found["hidden"][at : at + cut - start])
                every.sums.append(found["sums"][at : at + cut - start])
                every.sampled.append(temperature > 0)
            at += count
    out = [i for i, (ids, start) in enumerate(every.texts) if is_held_out(ids[:start])]
    chosen = set(out)
    return every.take([i for i in range(len(every.texts)) if i not in chosen]), every.take(out)


def frequent(data: Data, vocab_size: int, size: int, ends: list[int]) -> tuple[Tensor, float]:
    """([size] ids in ascending order: the most written tokens and those that end a text, the share of the text)."""
    counts = torch.bincount(torch.tensor([x for ids, start in data.texts for x in ids[start:]]), minlength=vocab_size)
    ranked = counts.double()
    # Tokens that were never written: those of low ids were merged first, and are more frequent in any text.
    ranked -= torch.arange(vocab_size) / (10.0 * vocab_size)
    ranked[ends] = ranked.max() + 1
    chosen = ranked.topk(size).indices.sort().values
    return chosen, float(counts[chosen].sum() / counts.sum())


def small_config(target: Any, layers: int, width: int) -> LlamaConfig:
    """The target's own sizes but for the number of layers and the width of the MLP."""
    keys = target.to_dict() | {"num_hidden_layers": layers, "intermediate_size": width, "dtype": "float32"}
    return LlamaConfig(**{k: v for k, v in keys.items() if k not in ("architectures", "model_type", "layer_types")})


@torch.no_grad()
def cut_out(folder: Path, layers: list[int], width: int, sample: list[list[int]]) -> tuple[LlamaModel, Tensor]:
    """(the draft as it begins, [V, H] the target's embedding). sample: texts by which neurons are chosen."""
    config, tensors = AutoConfig.from_pretrained(folder), load_file(folder / "model.safetensors")
    whole = LlamaModel(config).to(torch.bfloat16)
    whole.load_state_dict({key.removeprefix("model."): t for key, t in tensors.items() if key != "lm_head.weight"})
    found: dict[int, Tensor] = {}
    for layer in layers:
        down = whole.layers[layer].mlp.down_proj

        def note(module: Any, given: tuple[Tensor, ...], layer: int = layer) -> None:
            found[layer] = found.get(layer, 0) + given[0].float().pow(2).sum((0, 1))

        down.register_forward_pre_hook(note)
    whole.eval()(input_ids=padded(sample), use_cache=False)
    draft = LlamaModel(small_config(config, len(layers), width))
    for mine, layer in zip(draft.layers, layers, strict=True):
        theirs = whole.layers[layer].float().state_dict()
        weight = found[layer].sqrt() * theirs["mlp.down_proj.weight"].norm(dim=0)
        best = weight.topk(width).indices.sort().values
        for name in ("gate", "up"):
            theirs[f"mlp.{name}_proj.weight"] = theirs[f"mlp.{name}_proj.weight"][best]
        theirs["mlp.down_proj.weight"] = theirs["mlp.down_proj.weight"][:, best]
        mine.load_state_dict(theirs)
    draft.norm.load_state_dict(whole.norm.state_dict())
    embedding = whole.embed_tokens.weight.detach().clone()
    draft.embed_tokens.weight.data = embedding.float()
    draft.embed_tokens.weight.requires_grad_(False)
    return draft, embedding


def positions(data: Data, rows: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """tokens [B, T]; row and place [n] of each position before a token of an answer; the target's states and sums there."""
    tokens = padded([data.texts[i][0] for i in rows])
    row = torch.cat([torch.full((len(data.sums[i]),), at) for at, i in enumerate(rows)])
    place = torch.cat([torch.arange(len(data.sums[i])) + data.texts[i][1] - 1 for i in rows])
    return tokens, row, place, torch.cat([data.hidden[i] for i in rows]), torch.cat([data.sums[i] for i in rows])


def pull(mine: Tensor, theirs: Tensor, sums: Tensor, head: Tensor, tv: float) -> tuple[Tensor, float, float]:
    """(gradient [n, H] of the mean loss by the draft's normed states, mean KL, mean kept mass sum min(p, q)).

    mine, theirs [n, H] bfloat16; head [R, H] bfloat16. tv: weight of the total variation beside the KL (0 to 1). Nothing
    of size [n, R] outlives a piece, and no gradient is made for the head.
    """
    out, kl, kept = torch.empty_like(mine), 0.0, 0.0
    for begin in range(0, len(mine), 512):
        part = slice(begin, begin + 512)
        p, q = (theirs[part] @ head.T).float(), (mine[part] @ head.T).float()
        p_sum, q_sum = p.logsumexp(-1, keepdim=True), q.logsumexp(-1, keepdim=True)
        mass = (p_sum - sums[part, None]).exp().clamp_max(1.0)  # of the chosen tokens
        log_ratio = (p - p_sum).sub_(q - q_sum)
        p, q = p.sub_(p_sum).exp_(), q.sub_(q_sum).exp_()
        kl += float((mass[:, 0] * (p * log_ratio).sum(-1)).sum())
        true = p * mass
        kept += float(torch.minimum(true, q).sum())
        grad = (q - p).mul_(mass * (1 - tv))
        if tv:
            less = (q < true).float().mul_(q)  # d sum min(p, q) / d logit = q (1[q < p] - sum of q there)
            grad -= tv * (less - q * less.sum(-1, keepdim=True))
        out[part] = grad.bfloat16() @ head
    return out.float() / len(mine), kl / len(mine), kept / len(mine)


def forward(draft: LlamaModel, tokens: Tensor) -> Tensor:
    """Normed states [B, T, H], matrices multiplied in bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=True):
        out: Tensor = draft(input_ids=tokens, use_cache=False).last_hidden_state
    return out


@torch.no_grad()
def measure(draft: LlamaModel, data: Data, embedding: Tensor, vocab: Tensor) -> dict[str, Any]:
    """What is kept of the draft's guesses on these texts, by slot: a draft model reads text alone, so slot k is slot 1
    behind k - 1 kept tokens. At temperature 1 sum min(p, q), at 0 the same most probable token of all 49,152."""
    head = embedding[vocab]
    known = torch.zeros(len(embedding), dtype=torch.long) - 1
    known[vocab] = torch.arange(len(vocab))
    kept, same, kl, mass, sampled = [], [], 0.0, 0.0, []
    for at in range(0, len(data.texts), 16):
        rows = list(range(at, min(at + 16, len(data.texts))))
        tokens, row, place, theirs, sums = positions(data, rows)
        mine = forward(draft, tokens)[row, place].bfloat16()
        overlap, agree = [], []
        for a, b, s in zip(mine.split(256), theirs.split(256), sums.split(256), strict=True):
            whole = (b @ embedding.T).float()
            p, q = (whole[:, vocab] - s[:, None]).exp(), (a @ head.T).float()
            inside = p.sum(-1)
            kl += float((p * ((p / inside[:, None]).clamp_min(1e-30).log() - q.log_softmax(-1))).sum())
            mass += float(inside.sum())
            overlap.append(torch.minimum(p, q.softmax(-1)).sum(-1))
            agree.append(vocab[q.argmax(-1)] == whole.argmax(-1))
        sizes = [len(data.sums[i]) for i in rows]
        kept += list(torch.cat(overlap).split(sizes))
        same += list(torch.cat(agree).float().split(sizes))
        sampled += [data.sampled[i] for i in rows]

    def slots(parts: list[Tensor]) -> list[float]:
        """Kept at slot k, given that the slots before were kept."""
        found = []
        for k in range(1, SLOTS + 1):
            runs = [torch.stack([x[j : len(x) - SLOTS + 1 + j] for j in range(k)]) for x in parts if len(x) >= SLOTS]
            before = sum(float(r[:-1].prod(0).sum()) for r in runs)
            found.append(sum(float(r.prod(0).sum()) for r in runs) / max(before, 1e-9))
        return found

    greedy = [x for x, hot in zip(same, sampled, strict=True) if not hot]
    drawn = [x for x, hot in zip(kept, sampled, strict=True) if hot]
    count = data.num_tokens
    return {
        "num_texts": len(data.texts),
        "num_tokens": count,
        "kl": kl / count,
        "mass_of_draft_tokens": mass / count,
        "kept": float(torch.cat(kept).mean()),
        "same": float(torch.cat(same).mean()),
        "sampled_texts_kept_by_slot": slots(drawn),
        "greedy_texts_same_by_slot": slots(greedy),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--name", help="the target's, as 'foretell list' has it")
    parser.add_argument("--laws", type=Path, required=True, help="folder that recipes.own_answers wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 1, 29], help="of the target, to begin with")
    parser.add_argument("--width", type=int, default=512, help="of the MLP")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--longest", type=int, default=448, help="tokens of a text")
    parser.add_argument("--batch", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--near", type=float, default=0.5, help="weight of the distance of states, at the beginning")
    parser.add_argument("--tv", type=float, default=0.5, help="weight of the total variation, at the end")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prepare("recipes.distill_layers", threads=args.threads, niceness=10)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    learn, out = read(args.laws, args.longest)
    ends = torch.tensor(AutoConfig.from_pretrained(args.target).eos_token_id).view(-1).tolist()
    vocab, share = frequent(learn, AutoConfig.from_pretrained(args.target).vocab_size, args.vocab, ends)
    said = sum(sum(x in set(vocab.tolist()) for x in ids[start:]) for ids, start in out.texts) / max(1, out.num_tokens)
    print(f"{learn.num_tokens} tokens, {out.num_tokens} held out; {args.vocab} tokens: {share:.4f}, {said:.4f} of them")
    draft, embedding = cut_out(args.target, args.layers, args.width, [ids[:256] for ids, _ in learn.texts[-12:]])
    head = embedding[vocab]
    matrices = [p for p in draft.parameters() if p.requires_grad and p.ndim > 1]
    vectors = [p for p in draft.parameters() if p.requires_grad and p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}], lr=args.lr,
        betas=(0.9, 0.98), fused=True,
    )  # fmt: skip
    scale = torch.cat([h[:64] for h in learn.hidden[:64]]).float().pow(2).mean().item()
    watch, step, state = Stopwatch(), 0, args.out / "state.pt"
    if state.exists():
        found = torch.load(state)
        draft.load_state_dict(found["draft"])
        optimizer.load_state_dict(found["optimizer"])
        vocab, step, watch.elapsed_s = found["vocab"], found["step"], found["elapsed_s"]
        head = embedding[vocab]
    log, window = (args.out / "loss.jsonl").open("a"), []
    order: list[int] = []
    r = torch.Generator().manual_seed(args.seed + step)
    while (share := watch.elapsed_s / (60 * budget_minutes(args.out, args.minutes))) < 1:
        wait_while_paused(args.out)
        started = time.process_time()
        rows, size = [], 0
        while size < args.batch:
            order = order or torch.randperm(len(learn.texts), generator=r).tolist()
            rows.append(order.pop())
            size += len(learn.texts[rows[-1]][0])
        rows.sort(key=lambda i: len(learn.texts[i][0]))
        halves = [part for part in (rows[: len(rows) // 2], rows[len(rows) // 2 :]) if part]  # less padding
        total = sum(len(learn.sums[i]) for i in rows)
        figures = torch.zeros(3)
        for part in halves:
            tokens, row, place, theirs, sums = positions(learn, part)
            mine = forward(draft, tokens)[row, place].float()
            weight = len(sums) / total
            # The gradient by the states is made by hand, piece by piece, and handed to autograd for the layers.
            grad, kl, kept = pull(mine.detach().bfloat16(), theirs, sums, head, args.tv * max(0.0, 2 * share - 1))
            far = (mine.detach() - theirs.float()) / scale
            grad = (grad + args.near * (1 - share) ** 2 * 2 * far / far.numel()) * weight
            mine.backward(grad)
            figures += weight * torch.tensor([kl, kept, float(far.pow(2).mean() * scale)])
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate(share)
        torch.nn.utils.clip_grad_norm_(matrices + vectors, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        watch.elapsed_s += time.process_time() - started
        step += 1
        window.append(figures)
        if step % EVERY == 0:
            kl, kept, far_off = torch.stack(window).mean(0).tolist()
            line = {
                "step": step, "elapsed_s": round(watch.elapsed_s, 1), "kl": round(kl, 4), "kept": round(kept, 4),
                "distance": round(far_off, 4),
            }  # fmt: skip
            if step % (8 * EVERY) == 0:
                few = out.take(list(range(min(48, len(out.texts)))))
                line["held_out"] = measure(draft, few, embedding, vocab)
                torch.save(
                    {
                        "draft": draft.state_dict(), "optimizer": optimizer.state_dict(), "vocab": vocab, "step": step,
                        "elapsed_s": watch.elapsed_s,
                    }, state,
                )  # fmt: skip
            log.write(json.dumps(line) + "\n")
            log.flush()
            print(json.dumps(line), flush=True)
            window = []
    result = measure(draft, out, embedding, vocab)
    print(json.dumps(result, indent=1))
    layers = {f"model.{key}": t for key, t in draft.state_dict().items() if not key.startswith("embed_tokens")}
    save_borrowed(layers, vocab, draft.config, embedding, args.out / "model", target=args.name or args.target.name)
    record = {key: value if not isinstance(value, Path) else value.name for key, value in vars(args).items()}
    record |= {
        "steps": step, "seconds": round(watch.elapsed_s, 1), "result": result,
        "learned": {"num_texts": len(learn.texts), "num_tokens": learn.num_tokens, "coverage": share_of(learn, vocab)},
    }  # fmt: skip
    (args.out / "record.json").write_text(json.dumps(record, indent=1) + "\n")


def share_of(data: Data, vocab: Tensor) -> float:
    """How much of the answers the draft's tokens are."""
    said = torch.tensor([x for ids, start in data.texts for x in ids[start:]])
    return float(torch.isin(said, vocab).float().mean())


if __name__ == "__main__":
    main()
