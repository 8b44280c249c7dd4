"""What a transformers model can do here, found by running it: the one question of tables and of loading."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from foretell.core.errors import ModelError
from foretell.model.hf.adapter import TransformersModel


@dataclass(frozen=True)
class Support:
    """How a model can be decoded."""

    trees: bool  # over trees of guesses
    chains: bool  # over lines of guesses
    reason: str  # why not over trees, or why not at all; "" where trees are read


def support(module: PreTrainedModel, *, name: str | None = None) -> Support:
    """What a model in memory can do: it is probed over a few tokens, as at every load. A tiny random one tells as much as a
    large one, save for windows longer than the probe. The module stays as it is."""
    try:
        model = TransformersModel(module, name=name)
    except ModelError as error:
        return Support(trees=False, chains=False, reason=str(error))
    reason = model.spec.chains_only
    return Support(trees=not reason, chains=True, reason=reason)
