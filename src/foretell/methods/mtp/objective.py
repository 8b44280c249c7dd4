"""How an MTP module is trained: the target's distribution at every guess, the module fed on its own outputs, guess k with
weight decay ** (k - 1) (FastMTP: 0.6 and three guesses)."""

from foretell.methods.eagle.objective_eagle3 import Eagle3Objective
from foretell.methods.mtp.trained import MTPHead


class MTPObjective(Eagle3Objective):
    """EAGLE-3's training-time test on one tapped layer, with the whole vocabulary."""

    def __init__(self, head: MTPHead, *, num_slots: int = 3, decay: float = 0.6, alone: float = 0.0) -> None:
        """See ``Eagle3Objective``."""
        super().__init__(head, num_slots=num_slots, decay=decay, alone=alone)
