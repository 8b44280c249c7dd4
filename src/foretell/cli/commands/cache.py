"""``foretell cache``: what foretell keeps on the disk, and how it goes away."""

import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from foretell.cli import options as o
from foretell.cli.errors import say
from foretell.cli.output import deliver
from foretell.core.cachedir import cache_directory, models_directory
from foretell.core.errors import ConfigError, nearest

LIBRARIES = (".so", ".dylib", ".dll")


def _kernels(root: Path) -> Iterable[Path]:
    """Built libraries, and the folders of builds that were killed."""
    return (
        path for path in root.glob("*") if path.suffix in LIBRARIES or (path.name.startswith("tmp") and path.is_dir())
    )


def _within(name: str) -> Callable[[Path], Iterable[Path]]:
    return lambda root: (root / name).glob("*")


def _models(_: Path) -> Iterable[Path]:
    from foretell.checkpoints.catalogue import CATALOGUE

    here = models_directory()
    names = [form.format(name) for name in CATALOGUE for form in ("{}", ".{}.part", ".{}.tmp")]
    return (path for path in map(here.joinpath, names) if path.exists())


def _heads(_: Path) -> Iterable[Path]:
    from foretell.model.trained import heads_directory

    return heads_directory().glob("*")


@dataclass(frozen=True)
class Kind:
    """One kind of things that are kept."""

    about: str  # what it is, and what it costs to be without
    paths: Callable[[Path], Iterable[Path]]  # in the cache directory
    if_named: bool = False  # it is cleared only where it is named


KINDS = {
    "kernels": Kind("compiled C kernels; compiled again at the next start", _kernels),
    "costs": Kind("measured costs of passes; measured again at the next start", _within("costs")),
    "suites": Kind("questions fetched for bench; fetched again when they are named", _within("suites")),
    "models": Kind("models that 'foretell pull' has fetched; 'foretell rm NAME' deletes one", _models, if_named=True),
    "heads": Kind("heads that 'foretell train auto' has trained, and what they learned from", _heads, if_named=True),
    "history": Kind("what was typed in 'foretell chat'", _within("history"), if_named=True),
}
Action = Annotated[str, typer.Argument(metavar="[list|clear]", help="Show what is kept, or delete it.")]
Which = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KIND",
        show_default=False,
        help=f"{', '.join(KINDS)}. clear: all but models, heads and history, if none is named.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Delete without a question.")]


def cache(action: Action = "list", kinds: Which = None, yes: Yes = False, json_: o.Json = False) -> None:
    """What foretell keeps on the disk by itself: compiled kernels, measured costs, fetched questions, pulled models, heads,
    and the history of chat.

    'foretell cache clear' deletes it, after a question, but for models, heads and history, which are deleted where they are
    named. All but heads and history comes back when it is needed. FORETELL_CACHE and FORETELL_MODELS say where it is kept.
    What lies where you said (--output of bench and its .runs.jsonl, --learn-dir, --out of train) is yours, and not listed.
    """
    if action not in ("list", "clear"):
        raise ConfigError(f"action {action!r} must be list or clear{nearest(action, ('list', 'clear'))}")
    for kind in kinds or ():
        if kind not in KINDS:
            raise ConfigError(f"{kind!r} is no kind of thing that is kept{nearest(kind, KINDS)}")
    if yes and action == "list":
        raise ConfigError("--yes is for 'foretell cache clear': list deletes nothing")
    root = cache_directory()
    chosen = {
        name: [*kind.paths(root)]
        for name, kind in KINDS.items()
        if (name in kinds if kinds else action == "list" or not kind.if_named)
    }
    sizes = {name: sum(map(_size, paths)) for name, paths in chosen.items()}
    if action == "clear":
        _clear(chosen, sizes, yes=yes, json_=json_)
        return
    rows: list[dict[str, Any]] = [
        {"kind": name, "size": sizes[name], "count": len(paths), "directory": str(_place(name, root))}
        for name, paths in chosen.items()
    ]
    whole, places = sum(sizes.values()), ", ".join(dict.fromkeys(row["directory"] for row in rows))
    lines = [
        f"{row['kind']:<8} {_shown(row['size']):>10} {row['count']:>5}  {KINDS[row['kind']].about}" for row in rows
    ]
    told = "\n".join([*lines, f"{_shown(whole)} in all, in {places}"])
    deliver({"kinds": rows, "size": whole}, json_=json_, show=lambda: typer.echo(told))


def _clear(chosen: dict[str, list[Path]], sizes: dict[str, int], *, yes: bool, json_: bool) -> None:
    paths = [path for found in chosen.values() for path in found]
    if not paths:
        deliver({"freed": 0}, json_=json_, show=lambda: typer.echo(f"nothing is kept of {', '.join(chosen)}"))
        return
    what = ", ".join(f"{name} ({_shown(size)})" for name, size in sizes.items() if chosen[name])
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"nothing is deleted without a question or --yes: it would be {what}")
        if not typer.confirm(f"delete {what}?", err=True):
            raise typer.Exit(1)
    freed = 0
    for path in paths:
        size = _size(path)
        try:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        except FileNotFoundError:
            continue  # another process was faster
        except OSError as error:
            say(f"{path} is not deleted: {error.strerror}")
            continue
        freed += size
    deliver({"freed": freed}, json_=json_, show=lambda: typer.echo(f"deleted: {_shown(freed)}"))
    if any(path.exists() for path in paths):
        raise typer.Exit(1)


def _place(name: str, root: Path) -> Path:
    return {"models": models_directory(), "heads": models_directory() / "heads"}.get(name, root)


def _size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; what has gone meanwhile has none, and links are not followed."""
    try:
        if path.is_dir() and not path.is_symlink():
            return sum(_size(inner) for inner in path.iterdir())
        return path.lstat().st_size
    except OSError:
        return 0


def _shown(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size < 1e9 else f"{size / 1e9:.2f} GB"
