"""Watch single decode steps of the bundled pair: the tree, the target's own draws, the kept path, the time by part.

    python examples/one_step.py --seed 2 --steps 3

The walk in docs/how-a-step-works.md is this program's output.
"""

import argparse

import torch

import foretell
from foretell.verify.exact import target_draws


def describe(event: foretell.StepEvent, engine: foretell.Engine, temperature: float) -> str:
    """One step of a single request, in a few lines."""

    def text(token: int) -> str:
        assert engine.tokenizer is not None
        return f"{token} {engine.tokenizer.decode([token])!r}"

    tree, p = event.evidence.tree, event.evidence.p[0]
    tokens, parents, path = tree.tokens[0].tolist(), tree.parent[0].tolist(), event.commit.path[0]
    draws, length = target_draws(event.evidence)[0].tolist(), int(event.commit.length[0])
    q = torch.cat([logits[0] for logits in event.draft_logits]).div(temperature).softmax(-1)  # row i: after node i
    lines = [f"length {length}", "  node parent slot  token               q       p       target draws next   "]
    for node, (token, parent, drawn) in enumerate(zip(tokens, parents, draws, strict=True)):
        chances = f"{q[parent, token]:.4f}  {p[parent, token]:.4f}" if node else f"{'':6}  {'':6}"
        state = ("kept" if node else "pending") if node in path else "dropped"
        lines.append(
            f"  {node:4d} {parent:6d} {length + node:4d}  {text(token):18s}  {chances}  {text(drawn):18s}  {state}"
        )
    lines.append(f"  path {path}  bonus {text(int(event.verdict.bonus[0]))}  emitted {event.commit.tokens[0]}")
    rest = event.seconds_draft - event.seconds_draft_model
    lines.append(
        f"  ms: draft's passes {1e3 * event.seconds_draft_model:.2f}, rest of proposing {1e3 * rest:.2f}, "
        f"target's pass {1e3 * event.seconds_target:.2f}, everything else {1e3 * event.seconds_rest:.2f}"
    )
    return "\n".join(lines)


def main() -> None:
    """Decode a few steps and print each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default="def add(a, b):\n    return")
    parser.add_argument("--temperature", type=float, default=0.7, help="above 0")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    engine = foretell.Engine.load("bundled", speculative="draft_model")
    engine.observes_draft_logits = True
    shown: list[str] = []
    engine.observers.append(lambda event: shown.append(describe(event, engine, options.temperature)))
    completion = engine.generate(options.prompt, temperature=options.temperature, seed=options.seed, max_new_tokens=32)
    config = engine.resolved()
    print(f"{config['target']}, {config['implementation']}, {config['dtype']}, {config['speculative']}")
    for number, step in enumerate(shown[: options.steps], start=1):
        print(f"step {number}: {step}")
    print(f"{len(completion.token_ids)} tokens in {len(shown)} steps")


if __name__ == "__main__":
    main()
