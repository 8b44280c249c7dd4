"""Kinds of requests: found whatever came first, and each with its share of what is kept of old texts."""

import random
from collections import Counter
from collections.abc import Sequence

import torch

from foretell.learn.training.gate import HeldOut
from foretell.learn.training.texts import Clusters, ReplayBuffer, Text, sketch


def prompt(kind: int, r: random.Random) -> list[int]:
    """Words of a kind, and some that all kinds have."""
    return [r.randrange(40) if r.random() < 0.5 else 1000 * (kind + 1) + r.randrange(60) for _ in range(50)]


def text(kind: int, r: random.Random) -> Text:
    tokens = torch.tensor([*prompt(kind, r), 1], dtype=torch.int32)
    one = torch.zeros(1, 1)
    return Text(tokens, 50, 1.0, one.int(), one.half(), torch.zeros(1).half())


def kind_of(one: Text) -> int:
    return max(one.prompt) // 1000 - 1


def majority(clusters: Clusters, kind: int) -> tuple[int, float]:
    """The cluster of most prompts of a kind, and their share."""
    r = random.Random(f"asked/{kind}")
    counts = Counter(clusters.of([sketch(prompt(kind, r)) for _ in range(50)]))
    (cluster, count) = counts.most_common(1)[0]
    return cluster, count / 50


def test_kinds_that_come_one_after_the_other_are_told_apart() -> None:
    r, clusters = random.Random(1), Clusters(4)
    for kind in range(3):
        for _ in range(60):
            clusters.add(sketch(prompt(kind, r)))
    found = [majority(clusters, kind) for kind in range(3)]
    assert len({cluster for cluster, _ in found}) == 3
    # One of the three may be held in two clusters, but no prompt lies with another kind's.
    assert min(share for _, share in found) > 0.4
    assert sorted(share for _, share in found)[1] > 0.95


def test_two_that_are_near_are_joined_and_the_new_one_has_the_number_that_is_free() -> None:
    clusters = Clusters(2)
    first, near, far = sketch([1, 2, 3, 4]), sketch([1, 2, 3, 5]), sketch([6, 7, 8, 9])
    for one in (first, near, far):
        clusters.add(one)
    assert clusters.of([first, near, far]) == [0, 0, 1]
    assert clusters.weights == [2.0, 1.0]
    for one in (far, near):
        clusters.add(one)
    assert clusters.weights == [3.0, 2.0]


def old_kinds(kinds: Clusters | None, sent: Sequence[int]) -> Counter[int]:
    r, held_out = random.Random(4), HeldOut(kinds=kinds)
    for kind in sent:
        one = text(kind, r)
        if kinds is not None:
            kinds.add(one.sketch)
        held_out.add(one, r.randrange)
    return Counter(kind_of(one) for one in held_out.old)


def test_a_kind_that_has_become_rare_keeps_its_place_at_the_gate() -> None:
    sent = [0] * 40 + [1] * 400
    assert old_kinds(Clusters(4), sent)[0] >= 3
    assert old_kinds(None, sent)[0] <= 2, "without kinds few are left"


def test_every_kind_is_replayed_alike() -> None:
    r, kinds, buffer = random.Random(5), Clusters(4), ReplayBuffer(1 << 24)
    for kind in [0] * 20 + [1] * 300:
        one = text(kind, r)
        kinds.add(one.sketch)
        buffer.add(one)
    rare = dict.fromkeys(("kinds", "none"), 0)
    for _ in range(20):
        rare["kinds"] += sum(kind_of(one) == 0 for one in buffer.sample(8, r.randrange, kinds))
        rare["none"] += sum(kind_of(one) == 0 for one in buffer.sample(8, r.randrange))
    assert rare["kinds"] >= 2 * max(1, rare["none"])
    drawn = buffer.sample(320, r.randrange, kinds)
    assert len({id(one) for one in drawn}) == 320
    assert sum(kind_of(one) == 0 for one in drawn) == 20
