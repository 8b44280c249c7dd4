"""The architectures of GGUF files that are read."""

from foretell.checkpoints.gguf.families.architecture import Architecture
from foretell.checkpoints.gguf.families.decoders import DECODERS
from foretell.checkpoints.gguf.families.gemma4 import GEMMAS
from foretell.checkpoints.gguf.families.hybrids import HYBRIDS
from foretell.checkpoints.gguf.families.latent import LATENT
from foretell.checkpoints.gguf.families.mixtures import MIXTURES
from foretell.checkpoints.gguf.file import GGUFFile
from foretell.core.errors import ModelError, nearest

ARCHITECTURES: dict[str, Architecture] = {**DECODERS, **GEMMAS, **MIXTURES, **LATENT, **HYBRIDS}
"""``general.architecture`` -> what it is made of. Each family has a module of its own."""


def architecture_of(file: GGUFFile) -> Architecture:
    """The architecture of a file. Raises ModelError for one that cannot be read."""
    name = str(file.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{file.where} holds a model of architecture {name!r}"
            f"{nearest(name, ARCHITECTURES)} (of GGUF files; save_pretrained directories run nearly all)"
        )
    return ARCHITECTURES[name]
