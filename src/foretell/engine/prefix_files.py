"""Prefixes on disk: what ``prefix.py`` holds, for a process to come. ``Shelf`` says how files are kept.

A file is one text: its tokens, and the tensors of a ``Prefix``. The index of all files is made again at the start from
their tokens. Looking up is the engine's thread's, and loading where nothing decodes meanwhile; writing is another's, and
makes a new index each time.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretell.core.shelf import Shelf
from foretell.engine.prefix import KVPiece, Owner, Prefix, adapter_of, block_hashes, reach, shared
from foretell.model.recurrent import Saved

log = logging.getLogger(__name__)
MIN_GAIN = 64
"""Tokens more than what is held already that a file must bring, to be read or to be written."""
MIN_GAIN_SHARE = 1 / 8
"""The same as a share of a text, to be written: a conversation is written again each time that it is so much longer."""
MOST_AHEAD = 4
"""Files that are read before they are asked for: no more than are waited for, as a rule."""


@dataclass(frozen=True)
class _Text:
    """What the index knows of a file."""

    name: str
    ids: list[int]
    owner: str
    layers: tuple[int, ...]
    positions: list[int] | None  # of its states; None: the model has none

    def serves(self, owner: str, layers: tuple[int, ...]) -> bool:
        return self.owner == owner and (not layers or self.layers == layers)


class PrefixFiles:
    """See the module's docstring."""

    def __init__(self, shelf: Shelf) -> None:
        """Reads the tokens of all files."""
        self.shelf = shelf
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="foretell-prefixes")
        self._ahead: dict[str, Future[dict[str, Tensor] | None]] = {}  # files that are read beside the engine
        self._texts: dict[str, _Text] = {}
        for name, _ in sorted(shelf.entries.items(), key=lambda item: item[1].used):
            try:
                self._texts[name] = self._read(name)
            except (OSError, ValueError, KeyError) as error:
                log.warning("%s: a file is damaged and deleted (%s)", shelf.option, error)
                shelf.drop(name)
        self._index()

    def owner(self, owner: Owner) -> str:
        """Whose texts may be found by whom: equal for requests that may share KV. All that KV depends on beside the
        target and the tokens belongs here; an adapter's weights do, and its name does not tell them."""
        return self.shelf.owner(json.dumps(None if owner is None else owner[0]))

    def find(self, ids: list[int], layers: tuple[int, ...], owner: Owner, least: int) -> Prefix | None:
        """See ``Further``; its tensors are views of the file. Files that are damaged are left out."""
        for text in self._worth(ids, layers, owner, least):
            ahead = self._ahead.pop(text.name, None)
            found = self.shelf.get(text.name) if ahead is None else ahead.result()
            if found is not None:
                return _prefix(text, found, owner)
            self._forget(text.name)
        return None

    def load(self, ids: list[int], layers: tuple[int, ...], owner: Owner, least: int) -> Future[Any] | None:
        """See ``Further``."""
        text = next(self._worth(ids, layers, owner, least), None)
        if text is None:
            return None
        if text.name not in self._ahead:
            while len(self._ahead) >= MOST_AHEAD:  # of requests that have gone
                self._ahead.pop(next(iter(self._ahead))).cancel()
            self._ahead[text.name] = self._reader.submit(self.shelf.get, text.name)
        return self._ahead[text.name]

    def _worth(self, ids: list[int], layers: tuple[int, ...], owner: Owner, least: int) -> Iterator[_Text]:
        """Files that share clearly more than ``least`` tokens with ids, the most first."""
        if adapter_of(owner):
            return
        mine = self.owner(owner)
        for key in reversed(block_hashes(ids, mine)):
            text = self._blocks.get(key)
            if text is None or not text.serves(mine, layers):
                continue
            if reach(text.positions, shared(ids, text.ids)) >= least + MIN_GAIN:
                yield text

    def put(self, prefix: Prefix) -> None:
        """Write a text, unless files hold nearly all of it; the files of what it begins with go. Sets ``settled`` but where
        the disk refused."""
        owner, count = self.owner(prefix.owner), len(prefix.ids)
        positions = None if prefix.states is None else sorted(prefix.states)
        gain = max(MIN_GAIN, int(count * MIN_GAIN_SHARE))
        begins = list[str]()
        for text in list(self._texts.values()):
            if not text.serves(owner, prefix.layers):
                continue
            same = shared(prefix.ids, text.ids)
            if reach(positions, count) - reach(text.positions, same) < gain:
                prefix.settled = True
                return
            if same == len(text.ids) and text.layers in ((), prefix.layers):
                begins.append(text.name)
        if reach(positions, count) < gain:
            prefix.settled = True
            return
        name = self.shelf.name_of(owner, *map(str, prefix.ids), json.dumps(prefix.layers))
        about = {"owner": owner, "layers": json.dumps(prefix.layers), "positions": json.dumps(positions)}
        if self.shelf.put(name, about, _tensors(prefix)):
            prefix.settled = True
            known = {**self._texts, name: _Text(name, list(prefix.ids), owner, prefix.layers, positions)}
            for older in begins:
                self.shelf.drop(older)
        else:
            known = self._texts
        self._texts = {name: text for name, text in known.items() if name in self.shelf.entries}
        self._index()

    def _read(self, name: str) -> _Text:
        about = self.shelf.entries[name].about
        ids = self.shelf.peek(name, "ids").tolist()
        layers, positions = json.loads(about["layers"]), json.loads(about["positions"])
        return _Text(name, ids, about["owner"], tuple(layers), positions)

    def _forget(self, name: str) -> None:
        self._texts = {other: text for other, text in self._texts.items() if other != name}
        self._index()

    def _index(self) -> None:
        made = {key: text for text in self._texts.values() for key in block_hashes(text.ids, text.owner)}
        self._blocks: dict[int, _Text] = made  # replaced whole: whoever looks meanwhile has the one before


def _tensors(prefix: Prefix) -> dict[str, Tensor]:
    found = {"ids": torch.tensor(prefix.ids, dtype=torch.int32)}
    whole, count = prefix.whole(), len(prefix.ids)
    for kind, memory in (("keys", whole.keys), ("values", whole.values)):
        found |= {f"{kind} {layer}": each[:, :count] for layer, each in enumerate(memory)}
    if prefix.layers and whole.taps is not None:
        found["taps"] = whole.taps[:, :count]
    for at, saved in (prefix.states or {}).items():
        for mixer, states in enumerate(saved.tensors):
            found |= {f"state {at} {mixer} {kind} {number}": each for (kind, number), each in states.items()}
    return {key: each.cpu() for key, each in found.items()}


def _prefix(text: _Text, found: Mapping[str, Tensor], owner: Owner) -> Prefix:
    def of(kind: str) -> list[Tensor]:
        return [found[f"{kind} {layer}"] for layer in range(sum(key.startswith(f"{kind} ") for key in found))]

    states = None if text.positions is None else {at: Saved(at, []) for at in text.positions}
    for key in sorted(key for key in found if key.startswith("state ")):
        _, at, mixer, kind, number = key.split()
        tensors = (states or {})[int(at)].tensors
        tensors.extend({} for _ in range(int(mixer) + 1 - len(tensors)))
        tensors[int(mixer)][kind, int(number)] = found[key]
    pieces = [(KVPiece(of("keys"), of("values"), found.get("taps")), len(text.ids))]
    return Prefix(list(text.ids), pieces, text.layers, owner, states, settled=True)
