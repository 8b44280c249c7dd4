"""Writes ``requests.json``: 194 requests with the tokens that they give now. ``python -m tests.golden.make --overwrite``

Run it only where tokens are meant to change, and say why in the commit. Requests whose tokens hang on rounding are not
taken: each group is replayed with its logits moved at random, three times, by far more than rounding does, and a request
whose tokens then differ gets another seed and another prompt. So a mismatch is never a near-tie. The tokens must be the
same alone and in company, under every rule: a row's draws are keyed by its own seed.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch

from foretell import VERIFIERS, ConfigError, speculative_config
from tests.engine.harness import EOS, VOCAB
from tests.golden.replay import Group, alone, jitter, replay

PATH = Path(__file__).with_name("requests.json")
NUM_REQUESTS = 194
AMPLITUDE = {"table": 1e-5, "bundled": 5e-4}  # of the moved logits; rounding moves those of a table by less than 1e-12
SHAKES = 3
TREES = {
    "static": "static/branching=2x2x1", "sequoia": "sequoia/size=5",
    "dyspec": "dyspec/size=5/width=3", "eagle2": "eagle2/size=5/width=2", "opt_tree": "opt_tree/size=5/threshold=0",
}  # fmt: skip
TEXTS = (
    "def fibonacci(n):",
    "import os\n\n\ndef read(path):\n    ",
    "The three primary colours are",
    "class Stack:\n    def push(self",
    "for i in range(10):\n    print(",
    "Once upon a time there was a",
    '{"name": "test", "values": [1, 2',
    "x = [1, 2, 3]\ny = ",
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    ",
    "Question: what is 2 + 3?\nAnswer:",
    "try:\n    value = int(text)\nexcept",
    "# Sort a list of words by length\n",
    "    return self",
    "if __name__ ==",
    "with open(path) as file:\n    for line in file:\n        ",
    "README\n======\n\nThis package",
)


class Maker:
    """Groups without tokens, from one seed."""

    def __init__(self, seed: int = 20261122) -> None:
        self.rng = random.Random(seed)
        self.groups: list[Group] = []
        self.number = 0

    def request(self, world: str, **params: Any) -> dict[str, Any]:
        """A prompt of its own, a seed of its own."""
        self.number += 1
        made: dict[str, Any] = {"prompt": self.prompt(world)}
        length = self.rng.choice((9, 12, 16, 22)) if world == "table" else self.rng.choice((8, 12, 16))
        made["params"] = {"seed": self.number, "max_new_tokens": length, **params}
        return made

    def prompt(self, world: str) -> Any:
        if world == "bundled":
            return self.rng.choice(TEXTS)
        length = self.rng.choice((1, 2, 5, 9, 17, 30, 70))
        ids = [self.rng.randrange(EOS) for _ in range(length)]
        return (ids[:5] * 14)[:length] if self.rng.random() < 0.3 else ids

    def group(self, world: str, speculative: dict[str, Any], door: str, requests: list[Any], **more: Any) -> None:
        """One more group; raises ConfigError where its parts do not compose."""
        speculative_config(speculative)
        parts = [world, speculative["method"], speculative.get("verify", ""), speculative.get("shape", ""), door]
        name = f"{len(self.groups):02d} " + " ".join(part for part in parts if part)
        made: Group = {"id": name, "world": world, "speculative": speculative, "door": door, **more}
        self.groups.append({**made, "requests": requests})

    def temperatures(self, world: str, *values: float) -> list[Any]:
        return [self.request(world, temperature=value, ignore_eos=True) for value in values]

    def mixed(self) -> list[Any]:
        """Eight of mixed lengths, one of each kind of sampling."""
        kinds: list[dict[str, Any]] = [
            {"temperature": 1.0, "max_new_tokens": 30, "ignore_eos": True},
            {"temperature": 0.0, "repetition_penalty": 1.3, "ignore_eos": True},
            {"temperature": 0.7, "top_k": 5, "presence_penalty": 0.5},
            {"temperature": 1.3, "top_p": 0.8, "frequency_penalty": 0.3},
            {"min_p": 0.1, "logit_bias": {"3": 2.0, "4": -1.5}, "banned_token_ids": [0, 5], "ignore_eos": True},
            {"min_new_tokens": 12, "stop_token_ids": [1, 2, 6], "max_new_tokens": 25},
            {"stop": ["ab", "the", "zz"], "max_new_tokens": 25},
            {"restless": True, "temperature": 0.9, "max_new_tokens": 7, "ignore_eos": True},
        ]
        return [self.request("table", **kind) for kind in kinds]

    def make(self) -> list[Group]:
        """All groups."""
        self.rules()
        self.shapes()
        self.batches()
        self.methods()
        self.services()
        self.bundled()
        return self.groups

    def rules(self) -> None:
        """Every rule on a chain and on a tree; the judge reads hidden states, which a table has not."""
        base = {"method": "draft_model", "model": "table", "num_speculative_tokens": 4}
        for rule in VERIFIERS:
            if rule != "judge":
                self.group("table", {**base, "verify": rule}, "batch:3", self.temperatures("table", 0.0, 0.7, 1.0))
        for rule in VERIFIERS:
            config = {**base, "verify": rule, "shape": TREES["static"]}
            if rule != "judge" and _legal(config):
                self.group("table", config, "batch:2", self.temperatures("table", 0.7, 1.0))

    def shapes(self) -> None:
        """Every shape and every way of drawing."""
        base = {"method": "draft_model", "model": "table", "num_speculative_tokens": 4}
        for rule in ("coupled", "rejection"):
            for shape in ("adaptive", *list(TREES.values())[1:]):
                self.group(
                    "table", {**base, "verify": rule, "shape": shape}, "generate", self.temperatures("table", 1.0)
                )
        for draws in ("fixed", "iid", "without_replacement", "greedy"):
            config = {**base, "verify": "rejection", "shape": "static/branching=3x1", "draws": draws}
            self.group("table", config, "generate", self.temperatures("table", 1.0))

    def batches(self) -> None:
        """Batches of mixed lengths: more requests than rows, too."""
        base = {"method": "draft_model", "model": "table", "num_speculative_tokens": 3}
        self.group("table", base, "batch:8", self.mixed())
        self.group("table", {**base, "verify": "rejection"}, "batch:8", self.mixed())
        self.group("table", {**base, "shape": TREES["static"]}, "batch:3", self.mixed())

    def methods(self) -> None:
        """The methods without weights, and streams, and a fixed width."""
        for method in ("none", "ngram", "suffix", "prediction"):
            requests = self.temperatures("table", 0.0, 0.7)
            if method == "prediction":
                for one in requests:
                    one["prediction"] = [self.rng.randrange(VOCAB) for _ in range(8)]
            self.group("table", {"method": method, "num_speculative_tokens": 4}, "batch:2", requests)
        base = {"method": "draft_model", "model": "table", "num_speculative_tokens": 3}
        self.group("table", {**base, "verify": "block"}, "stream", self.temperatures("table", 0.7, 1.0))
        self.group("table", base, "batch:2", self.temperatures("table", 0.0, 1.0), width=8)

    def services(self) -> None:
        """Mixed methods in one service, and one rule that reads q."""
        base = {"method": "draft_model", "model": "table", "num_speculative_tokens": 4}
        ways: list[Any] = [
            None, {"method": "none"}, {"method": "ngram", "num_speculative_tokens": 4}, {"method": "suffix"},
            {"method": "suffix"}, {**base, "num_speculative_tokens": 2}, {**base, "shape": TREES["static"]},
            {"method": "prediction"},
        ]  # fmt: skip
        requests: list[Any] = []
        for index, one in enumerate(self.mixed() + self.mixed() + self.mixed()):
            way = ways[(index + index // 8) % len(ways)]
            if way is not None:
                one["speculative"] = way
                if way["method"] == "prediction":
                    one["prediction"] = [self.rng.randrange(VOCAB) for _ in range(8)]
            requests.append(one)
        self.group("table", base, "service", requests)
        self.group(
            "table", {**base, "verify": "rejection"}, "service", self.temperatures("table", *(0.0, 0.7, 1.0) * 3)
        )

    def bundled(self) -> None:
        """The bundled pair and its heads, in float32."""
        pair = {"method": "draft_model", "num_speculative_tokens": 5}
        self.group("bundled", pair, "generate", self.temperatures("bundled", 0.0, 0.7, 1.0))
        for method in ("medusa", "eagle1", "eagle2", "eagle3", "dflash", "kangaroo"):
            self.group("bundled", {"method": method}, "batch:2", self.temperatures("bundled", 0.0, 0.7))
        for config in (
            {**pair, "shape": "specdec"}, {**pair, "verify": "rejection"}, {**pair, "verify": "judge"},
            {**pair, "verify": "traversal", "shape": "dyspec/size=6/width=3"},
        ):  # fmt: skip
            self.group("bundled", config, "generate", self.temperatures("bundled", 1.0))
        lengths = (4, 9, 14, 20, 6, 24, 11, 3)
        requests = [
            self.request("bundled", temperature=(0.0, 0.7, 1.0)[index % 3], max_new_tokens=length)
            for index, length in enumerate(lengths)
        ]
        self.group("bundled", pair, "batch:4", requests)
        left = NUM_REQUESTS - sum(len(group["requests"]) for group in self.groups)
        self.group("bundled", pair, "service", self.temperatures("bundled", *((0.0, 0.7, 1.0) * 4)[:left]))


def _legal(config: dict[str, Any]) -> bool:
    try:
        speculative_config(config)
    except ConfigError:
        return False
    return True


def decide(maker: Maker, group: Group) -> None:
    """Give every request its tokens, and those whose tokens hang on rounding another seed and prompt."""
    amplitude = AMPLITUDE[group["world"]]
    for _ in range(30):
        found, solo = replay(group), alone(group)
        wavering = set()
        for number in range(SHAKES):
            shake = jitter(amplitude, number)
            for index, (one, two) in enumerate(zip(replay(group, shake), alone(group, shake), strict=True)):
                if (one, two) != (found[index], solo[index]):
                    wavering.add(index)
        if not wavering:
            break
        for index in wavering:
            group["requests"][index]["prompt"] = maker.prompt(group["world"])
            group["requests"][index]["params"]["seed"] += 1000
    else:
        raise SystemExit(f"{group['id']}: requests {sorted(wavering)} stay unsteady")
    if found != solo:
        raise SystemExit(f"{group['id']}: company changes tokens")
    for request, tokens in zip(group["requests"], found, strict=True):
        request["tokens"] = tokens


def text_of(groups: list[Group]) -> str:
    """JSON with one line a request."""
    blocks = []
    for group in groups:
        head = json.dumps({key: value for key, value in group.items() if key != "requests"})
        lines = ",\n  ".join(json.dumps(request, separators=(",", ":")) for request in group["requests"])
        blocks.append(f'{head[:-1]}, "requests": [\n  {lines}\n ]}}')
    return "[\n " + ",\n ".join(blocks) + "\n]\n"


def main() -> None:
    """Make the file; refuse to replace one unless asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--overwrite", action="store_true", help="replace the file that is there")
    if not parser.parse_args().overwrite and PATH.exists():
        sys.exit(f"{PATH} is there: its tokens are what later versions are held to. --overwrite replaces it")
    torch.set_num_threads(1)
    maker = Maker()
    groups = maker.make()
    count = sum(len(group["requests"]) for group in groups)
    if count != NUM_REQUESTS:
        sys.exit(f"{count} requests, {NUM_REQUESTS} are wanted")
    for group in groups:
        decide(maker, group)
        print(group["id"], flush=True)
    PATH.write_text(text_of(groups))


if __name__ == "__main__":
    main()
