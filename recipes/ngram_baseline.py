"""Interpolated modified Kneser-Ney 5-gram over the same tokens as the target: the bar that a neural model must clear.

Counted on exactly the tokens that the target was trained on (``--tokens`` from the front of the stream). Everything is
sorting: an n-gram is the pair (id of its first n-1 tokens, last token), ids come from `np.unique`, lookups from
`np.searchsorted`. Formulas: Chen and Goodman, "An empirical study of smoothing techniques" (1999), section 3.
Memory: about 1 GB for 20 million tokens.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from recipes.heldout import heldout_texts
from recipes.mix import END_OF_TEXT

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class KneserNey:
    """Counts of one stream, and the probability of each token of another."""

    def __init__(self, tokens: Ints, *, vocabulary: int, order: int = 5) -> None:
        """Count `tokens` [T]."""
        self.vocabulary, self.order = vocabulary, order
        self.keys: list[Ints] = [np.empty(0, np.int64)]  # keys[n]: sorted keys of order n + 1; order 1 needs none
        ids: Ints = tokens  # id of the n-gram that starts at each position
        raw: list[Ints] = [np.bincount(tokens, minlength=vocabulary)]
        continuation: list[Ints] = []
        for n in range(2, order + 1):
            key = ids[: len(tokens) - n + 1] * vocabulary + tokens[n - 1 :]
            unique, first, inverse = np.unique(key, return_index=True, return_inverse=True)
            # How many different tokens stand before an (n-1)-gram: the number of n-grams that end in it.
            continuation.append(np.bincount(ids[first + 1], minlength=len(raw[-1])))
            raw.append(np.bincount(inverse))
            self.keys.append(unique)
            ids = inverse.astype(np.int64)
        self.counts = [*continuation, raw[-1]]  # counts[n]: of order n + 1, what the smoothing works on
        self.discounts = [self._discounts(c) for c in self.counts]
        self.totals: list[Floats] = []
        self.backoffs: list[Floats] = []
        for n, count in enumerate(self.counts):
            parent = self.keys[n] // vocabulary if n else np.zeros(len(count), np.int64)
            size = len(self.counts[n - 1]) if n else 1
            total = np.bincount(parent, weights=count, minlength=size)
            kept_back = np.bincount(parent, weights=self._discount(n, count), minlength=size)
            self.totals.append(total)
            self.backoffs.append(np.divide(kept_back, total, out=np.ones(size), where=total > 0))

    @staticmethod
    def _discounts(counts: Ints) -> Floats:
        """D for counts 0, 1, 2 and 3 or more."""
        n1, n2, n3, n4 = (max(1, int((counts == k).sum())) for k in (1, 2, 3, 4))
        y = n1 / (n1 + 2 * n2)
        return np.clip([0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3], 0, [0, 1, 2, 3])

    def _discount(self, n: int, count: Ints) -> Floats:
        return self.discounts[n][np.minimum(count, 3)]

    def _ids(self, tokens: Ints, n: int) -> Ints:
        """Id of the n-gram that *ends* at each position, -1 where it was never seen: [T]."""
        ids = np.full(len(tokens), -1)
        if n == 0 or len(tokens) < n:
            return ids * 0 if n == 0 else ids
        current = tokens[: len(tokens) - n + 1].copy()
        for k in range(1, n):
            key = current * self.vocabulary + tokens[k : len(tokens) - n + 1 + k]
            at = np.minimum(np.searchsorted(self.keys[k], key), len(self.keys[k]) - 1)
            current = np.where((current >= 0) & (self.keys[k][at] == key), at, -1)
        ids[n - 1 :] = current
        return ids

    def probabilities(self, tokens: Ints) -> Floats:
        """P(token | tokens before it) for tokens [T]: [T - 1] of the second to the last."""
        p = np.full(len(tokens) - 1, 1.0 / self.vocabulary)
        for n in range(self.order):
            context = self._ids(tokens, n)[:-1]  # the n tokens before
            gram = self._ids(tokens, n + 1)[1:]
            count = np.where(gram >= 0, self.counts[n][gram], 0)
            known = (context >= 0) & (self.totals[n][context] > 0)
            total = np.where(known, self.totals[n][context], 1.0)
            q = (count - self._discount(n, count)) / total + self.backoffs[n][context] * p
            p = np.where(known, q, p)
        return p


def main() -> None:
    """Command line: bits per byte of held-out text, by category."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=0, help="how many tokens of the stream to count; 0: all")
    parser.add_argument("--bytes", type=int, default=150_000, help="held-out bytes per category")
    parser.add_argument("--out", type=Path, help="write the result here too (JSON)")
    args = parser.parse_args()
    os.nice(19)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    stream = np.load(args.data / "train.npy", mmap_mode="r")
    stream = stream[: args.tokens] if args.tokens else stream
    model = KneserNey(np.asarray(stream, np.int64), vocabulary=len(tokenizer))
    result: dict[str, float] = {"tokens_counted": len(stream)}
    for category, texts in heldout_texts(args.data, bytes_per_category=args.bytes).items():
        bits = 0.0
        for text in texts:
            ids = np.asarray([END_OF_TEXT, *tokenizer(text, verbose=False)["input_ids"]], np.int64)
            bits -= float(np.log2(model.probabilities(ids)).sum())
        result[category] = round(bits / sum(len(t.encode()) for t in texts), 4)
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
