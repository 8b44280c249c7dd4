"""Reinforcement learning with guesses: a policy that changes after every batch, and a drafter that follows it.

    python examples/rollouts.py [--steps 40] [--lr 1e-3] [--seed 1]

The policy is the bundled target as a module of transformers, which the engine decodes as it is, so a step of the optimizer
is all that "new weights" takes. The toy reward likes tokens with even numbers, token by token. Each batch is written three
times with the same seeds: without guesses, with the bundled draft as it is, and with one that learns from the batches. The
tokens must be equal, or the program ends: they are samples of the policy of this very step, whatever guesses. The
drafter's own training is timed apart.
"""

import argparse
import random
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM

from foretell import Engine, SamplingParams, bundled
from foretell.learn.options import LearnOptions
from foretell.learn.session import Session
from foretell.model.load import load_tokenizer

ROWS, TOKENS = 8, 48
WORDS = " ".join(
    topics[name] for name in sorted(topics)
).split()  # of Python's own reference: every prompt is another one


@dataclass
class Arm:
    """One way of writing the rollouts."""

    session: Session
    seconds: list[float] = field(default_factory=list)  # of each batch, learning left out
    kept: list[float] = field(default_factory=list)  # share of its first guesses
    learning: float = 0.0  # seconds

    def write(self, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
        """The tokens of a batch."""
        began, before = perf_counter(), self.learned()
        done = sorted(self.session.run(prompts, params), key=lambda one: one.seed or 0)
        took, learned = perf_counter() - began, self.learned() - before
        self.seconds.append(took - learned)
        self.learning += learned
        first = [accepted > 0 for one in done for drafted, accepted in one.steps if drafted]
        self.kept.append(sum(first) / max(1, len(first)))
        return [one.token_ids for one in done]

    def learned(self) -> float:
        """Seconds of training so far."""
        return 0.0 if self.session.learner is None else self.session.learner.figures().seconds_learning


def improve(
    policy: torch.nn.Module, optimizer: torch.optim.Optimizer, prompts: list[list[int]], texts: list[list[int]]
) -> float:
    """A step of policy gradient; returns the mean reward of a token."""
    optimizer.zero_grad()
    rewards = [1.0 - torch.tensor(text) % 2 for text in texts]
    mean = torch.cat(rewards).mean()
    for prompt, text, reward in zip(prompts, texts, rewards, strict=True):
        logits = policy(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(text)[:, None])[:, 0]
        (-((reward - mean) * chosen).sum() / (len(texts) * TOKENS)).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return float(mean)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--guesses", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    policy = AutoModelForCausalLM.from_pretrained(bundled.path("target"), dtype=torch.float32).eval()
    tokenizer = load_tokenizer("bundled")
    guessing = {"method": "draft_model", "model": "bundled/draft", "num_speculative_tokens": args.guesses}
    learn = LearnOptions(where="inline", learn_share=1.0, seed=args.seed)
    arms = {
        "none": Arm(Session(Engine(policy, tokenizer, speculative="none"), None, max_rows=ROWS)),
        "frozen": Arm(Session(Engine(policy, tokenizer, speculative=guessing), None, max_rows=ROWS)),
        "following": Arm(Session(Engine(policy, tokenizer, speculative=guessing), learn, max_rows=ROWS)),
    }
    r = random.Random(args.seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.lr)
    params = SamplingParams(temperature=1.0, max_new_tokens=TOKENS, seed=1000 * args.seed, ignore_eos=True)
    print("step  reward  first guesses kept: frozen, following  tokens/s over none: frozen, following")
    for step in range(args.steps):
        places = [r.randrange(len(WORDS) - 8) for _ in range(ROWS)]
        prompts = [tokenizer.encode(" ".join(WORDS[at : at + 8])) for at in places]
        names = [*arms][step % 3 :] + [*arms][: step % 3]  # by turns, so that a busy machine is busy for all
        texts = {name: arms[name].write(prompts, params) for name in names}
        if not texts["none"] == texts["frozen"] == texts["following"]:
            raise SystemExit(f"step {step}: guesses changed the text")
        with torch.inference_mode(False):
            reward = improve(policy, optimizer, prompts, texts["none"])
        none, frozen, following = arms.values()
        print(
            f"{step:4d}  {reward:.3f}   {frozen.kept[-1]:.2f} {following.kept[-1]:.2f}   "
            f"{none.seconds[-1] / frozen.seconds[-1]:.2f} {none.seconds[-1] / following.seconds[-1]:.2f}",
            flush=True,
        )
    quarter = max(1, args.steps // 4)
    none, frozen, following = (sum(arm.seconds[-quarter:]) for arm in arms.values())
    print(
        f"last quarter: tokens/s, following over frozen {frozen / following:.2f}, frozen over none {none / frozen:.2f}, "
        f"following over none {none / following:.2f}; the drafter's training took {arms['following'].learning:.1f} s of "
        f"{sum(arms['following'].seconds):.1f} s of decoding"
    )
    arms["following"].session.close()


if __name__ == "__main__":
    main()
