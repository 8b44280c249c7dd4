"""What a resolved name holds, a Hugging Face directory or a GGUF file, behind a few functions."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from foretell.checkpoints import configs
from foretell.checkpoints.ends import drop_default
from foretell.checkpoints.weights import SafetensorsWeights, WeightSource


def is_file(path: Path) -> bool:
    """Whether this is a GGUF file (``checkpoint.resolve`` gives no other files), not a directory."""
    return path.is_file()


def open_weights(path: Path, *, name: str) -> WeightSource:
    """The tensors, by the names that transformers saves them by. Raises ModelError where they cannot be read."""
    if is_file(path):
        from foretell.checkpoints.gguf.file import open_gguf
        from foretell.checkpoints.gguf.weights import GGUFWeights

        return GGUFWeights(open_gguf(path, name=name))
    return SafetensorsWeights(path, name=name)


def read_plain(path: Path, *, name: str) -> tuple[Any, Any] | None:
    """The configuration, as transformers has it, and the ends that a generation configuration names; without transformers.
    None where transformers has to read them. Raises ModelError for a GGUF file that cannot be used."""
    if is_file(path):
        from foretell.checkpoints.gguf.config import end_ids, read_plain as read
        from foretell.checkpoints.gguf.file import open_gguf

        file = open_gguf(path, name=name)
        found = read(file)
        return None if found is None else (found, SimpleNamespace(eos_token_id=end_ids(file)))
    found, generation = configs.read_plain(path), configs.stated(path / "generation_config.json")
    if found is None or (generation is None and (path / "generation_config.json").is_file()):
        return None
    ends = (generation or {}).get("eos_token_id")
    is_known = ends is None or type(ends) is int or (isinstance(ends, list) and all(type(one) is int for one in ends))
    return (drop_default(found, path), SimpleNamespace(eos_token_id=ends)) if is_known else None


def read_config(path: Path, *, name: str) -> Any:
    """The transformers configuration. Raises ModelError, or what transformers raises, where it cannot be read."""
    if is_file(path):
        from foretell.checkpoints.gguf.config import read_config as read
        from foretell.checkpoints.gguf.file import open_gguf

        return read(open_gguf(path, name=name))
    from transformers import AutoConfig

    return drop_default(AutoConfig.from_pretrained(str(path), local_files_only=True), path)


def read_generation(path: Path, *, name: str) -> Any:
    """The transformers generation configuration, or None where there is none."""
    if is_file(path):
        from foretell.checkpoints.gguf.config import read_generation as read
        from foretell.checkpoints.gguf.file import open_gguf

        return read(open_gguf(path, name=name))
    from transformers import GenerationConfig

    has_one = (path / "generation_config.json").is_file()
    return GenerationConfig.from_pretrained(path, local_files_only=True) if has_one else None
