"""``foretell export``: heads for other engines."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.checkpoints.catalogue import CATALOGUE
from foretell.cli import early, options as o
from foretell.cli.output import deliver
from foretell.core.errors import ConfigError, nearest
from foretell.core.registry import names_of

if TYPE_CHECKING:
    from foretell.heads.head import Head
    from foretell.model.target import ModelSpec

HeadDir = Annotated[
    str, typer.Argument(metavar="HEAD", help="A trained head: a directory, a Hugging Face id, or bundled/<method>.")
]


GGUF = "gguf"
"""The layout that is a file."""
SUMMARY = "EAGLE-3, DFlash and DSpark as one file (llama.cpp)"


def export(
    head: HeadDir,
    to: Annotated[str, typer.Option("--to", metavar="LAYOUT", help="'list' shows them and their readers.")] = "list",
    out: Annotated[
        str | None, typer.Option("--out", metavar="DIR", help="Where the head goes: a directory; of 'gguf' a file.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", metavar="NAME_OR_DIR", help="The model it drafts for. Default: as recorded in the head."
        ),
    ] = None,
    json_: o.Json = False,
) -> None:
    """Write a head in another layout, for another engine; 'gguf' writes a file for llama.cpp. No tensor changes.

    With a target that is here (a directory, or 'bundled'), the head is checked against it, and missing keys of other
    tools' files are derived from it.
    """
    from foretell.checkpoints.directories import find_here, resolve

    if to != "list":  # before torch is imported
        find_here(head)
        if to not in (layouts := names_of(early.known()["options"]["layouts"], "foretell.heads")) and to != GGUF:
            raise ConfigError(f"layout {to!r} is unknown{nearest(to, layouts)}")
    from foretell.heads import formats

    if to == "list":
        if out is not None:
            raise ConfigError(
                f"--out {out} is given and no layout to write: add --to, one of {', '.join(formats.HEADS)}"
            )
        known = {layout.name: layout.summary for layout in formats.HEADS.values()} | {GGUF: SUMMARY}
        lines = "\n".join(f"{name:12} {summary}" for name, summary in known.items())
        deliver({"layouts": known}, json_=json_, show=lambda: typer.echo(lines))
        return
    if out is None:
        raise ConfigError("--out is missing; expected the directory to write, or of 'gguf' the file")
    path = resolve(head)
    recorded = formats.describe_target(path)
    spec = None if target is None else find_target(target)
    loaded = formats.load(path, num_layers=spec.num_layers if spec else recorded.num_layers, name=head)
    if spec is not None:
        loaded.check_target(spec, name=head)
    if loaded.lent and target is not None:
        from foretell.model.load import load_model

        loaded.borrow(load_model(target, dtype="float32"))
    about = spec if spec is not None else recorded
    try:
        if to == GGUF:
            _save_gguf(loaded, out, target, spec)
        else:
            formats.save(loaded, out, to, target_name=target, target=about, extra=formats.describe_extra(path))
    except OSError as error:  # that of a full disk does not say where
        raise OSError(error.errno, error.strerror, error.filename or out) from None
    wrote = {"out": out, "layout": to, "head": loaded.method, "parameters": loaded.num_parameters}
    line = f"{out}: {loaded.method}, {loaded.num_parameters:,} parameters, layout {to}"
    deliver(wrote, json_=json_, show=lambda: typer.echo(line))


def _save_gguf(head: "Head", out: str, target: str | None, spec: "ModelSpec | None") -> None:
    """Write a head as a GGUF file, in which its target's vocabulary is. Raises ConfigError without a target here."""
    from foretell.checkpoints.directories import resolve
    from foretell.checkpoints.gguf.write_heads import vocabulary_of
    from foretell.heads import formats

    if target is None or spec is None:
        raise ConfigError(
            "a GGUF file of a head holds its target's vocabulary: give the target's directory or GGUF file as --target"
        )
    formats.save_gguf(head, out, vocabulary_of(resolve(target), name=target, size=spec.vocab_size), target=spec)


def find_target(name: str) -> "ModelSpec | None":
    """The specification of a local target, without its weights; None for one on the hub.

    Raises ModelError where its directory has no usable configuration.
    """
    import torch

    from foretell.checkpoints.directories import resolve
    from foretell.model.load import load_config
    from foretell.model.target import ModelSpec

    local = name == "bundled" or name in CATALOGUE or name.startswith(("bundled/", ".", "/", "~"))
    if not (local or Path(name).exists()):
        return None
    config = load_config(resolve(name), name=name)
    text = config.get_text_config()
    return ModelSpec(
        name=name,
        architecture=next(iter(config.architectures or ()), ""),
        implementation="none",
        vocab_size=text.vocab_size,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        max_positions=text.max_position_embeddings,
        dtype=torch.float32,
        device=torch.device("cpu"),
        weight_bytes=0,
    )
