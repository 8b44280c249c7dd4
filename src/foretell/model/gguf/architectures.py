"""The architectures of GGUF files that are read."""

from foretell.core.errors import ModelError, nearest
from foretell.model.gguf.architecture import Architecture
from foretell.model.gguf.decoders import DECODERS
from foretell.model.gguf.file import GGUFFile
from foretell.model.gguf.gemmas import GEMMAS
from foretell.model.gguf.hybrids import HYBRIDS
from foretell.model.gguf.latent import LATENT
from foretell.model.gguf.mixtures import MIXTURES

ARCHITECTURES: dict[str, Architecture] = {**DECODERS, **GEMMAS, **MIXTURES, **LATENT, **HYBRIDS}
"""``general.architecture`` -> what it is made of. Each family has a module of its own."""


def architecture_of(file: GGUFFile) -> Architecture:
    """The architecture of a file. Raises ModelError for one that cannot be read."""
    name = str(file.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{file.name}: {file.path.name} holds a model of architecture {name!r}"
            f"{nearest(name, ARCHITECTURES)} (of GGUF files; save_pretrained directories run nearly all)"
        )
    return ARCHITECTURES[name]
