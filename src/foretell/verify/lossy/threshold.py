"""SGLang's two thresholds."""

from dataclasses import dataclass

from torch import Tensor

from foretell.verify.lossy.base import Lossy, Mismatch, require


@dataclass(frozen=True)
class Threshold(Lossy):
    """SGLang's two thresholds (``--speculative-accept-threshold-single`` and ``-acc``), on the coupled base.

    ``single``: tolerate any child with p(x) >= single; 1 tolerates nothing. ``accumulated`` (thr_acc): children together
    are accepted with min(1, S / accumulated), S the sum of p over the node's children (equal ones count once), instead
    of S. SGLang decides all by one coin u: the first child i with u <= (p of children up to i) / accumulated. Here the
    target's draw decides first, with chance p_i for child i; if it hits none, a coin of its own (stream COIN) accepts
    child i with such a chance that i gains (1 / accumulated - 1) p_i in all, children in order, until 1 - S is used up.
    So while S <= accumulated every child has SGLang's distribution, p_i / accumulated, and beyond it the same total, 1, of
    which later children keep at least p_i. The token emitted otherwise has the distribution of p outside the children.
    All this for children drawn independently of COUPLED. Those drawn from it agree with the target more often, so that
    the coin is tossed less often: by Harris' inequality the draw then misses a set A of children with at most 1 - p(A),
    and the bound below holds as well. Where both kinds stand under one node it is not proved.

    SGLang's defaults are 1 and 1, which is ``coupled``; the defaults here are lower, so that the rule has an effect.
    """

    name = "threshold"
    summary = "lossy: also accept guesses above a probability, or all guesses with their probabilities scaled up"
    distance = "a token's probability, given the text before it, at most p / min(single, accumulated)"

    single: float = 1.0
    accumulated: float = 0.8

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        for name in ("single", "accumulated"):
            value = getattr(self, name)
            require(0 < value <= 1, name, value, "above 0 and at most 1 (1: tolerate nothing)")

    def tolerated(self, mismatch: Mismatch) -> Tensor:
        """By p alone, or by the coin of the parent."""
        good = mismatch.chance >= self.single
        if self.accumulated == 1.0:
            return good
        tree, noise = mismatch.evidence.tree, mismatch.evidence.noise
        assert noise is not None
        sibling = (tree.parent[:, :, None] == tree.parent[:, None, :]) & mismatch.asked[:, None, :]  # [B, N, N]
        again = sibling & (tree.tokens[:, :, None] == tree.tokens[:, None, :])
        share = mismatch.chance.double().masked_fill(again.tril(-1).any(-1), 0.0)
        siblings = sibling.double()
        upto = (siblings.tril() @ share[:, :, None])[..., 0]  # [B, N] S up to and with this child
        missed = 1.0 - (siblings @ share[:, :, None])[..., 0]  # what the target's draw had
        coin = mismatch.of_parent(noise.coins(tree.num_nodes))
        return good | (coin * missed.clamp(min=0.0) < upto * (1.0 / self.accumulated - 1.0))
