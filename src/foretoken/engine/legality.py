"""``draft.legality``, by the name that it had before methods' configurations moved beside their drafters."""

from foretoken.draft.legality import SAMPLED, check_combination, parse_draws, refusal

__all__ = ["SAMPLED", "check_combination", "parse_draws", "refusal"]
