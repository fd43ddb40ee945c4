"""Seals of audits as files beside a table, and which of them count.

    <folder>/<number / 1000>/<number>-<hash>-<hash of the seal before it>.json

Object stores behind Arrow's file systems cannot create a file only if it does not exist. So a file alone proves
nothing: the table's own metadata, which changes by compare-and-set, names the newest seal (`At`), and each file's name
the seal before it. Of two audits that wrote a file with one number, one wins that change; the other's never counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from delivered.kits.table.store import Store
from delivered.ledger import not_next
from delivered.model.errors import InvariantBroken
from delivered.model.work import Failed, Ok, Outcome

_BLOCK = 1000
"""Seals per folder: to find the newest, one folder is listed."""
_PARALLEL = 16


@dataclass(frozen=True)
class At:
    """
    Attributes:
        number: of a seal; -1: there is none.
        digest: of its text and the digest before it, 63 bits.
    """

    number: int = -1
    digest: int = 0

    def then(self, text: str) -> At:
        """The seal that follows it, with this text."""
        raw = hashlib.blake2b(f"{self.digest:016x}\n{text}".encode(), digest_size=8).digest()
        return At(self.number + 1, int.from_bytes(raw, "big") >> 1 or 1)


NONE = At()
_Found = tuple[At, int, str]
"""A seal's place, the hash of the one before it, and its file."""


class SealFiles:
    """The files of one sink's chain. Args: folder: below the store's root; contains nothing else."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder

    def add(
        self, sink: str, number: int, text: str, newest: Callable[[], At], move: Callable[[At, At], Outcome[None]]
    ) -> Outcome[None]:
        """See `delivered.ledger.Store.add_seal`.

        Args:
            newest: reads what the table's metadata names now.
            move: (from, to): names another seal there, if it still names the one before it.
        """
        named = newest()
        before = next((at for at, _, _ in self._last(named)), NONE)
        if number != before.number + 1:
            return Ok(None) if self._is(named, number, text) else not_next(sink, number, before.number)
        after = before.then(text)
        name = self._name(after, before)
        self._store.put(name, text.encode())
        outcome = move(named, after)
        if not isinstance(outcome, Failed):
            return outcome
        now = newest()
        if now == named:
            return outcome
        if self._is(now, number, text):  # another audit proved the same
            return Ok(None)
        self._store.remove([name])
        return not_next(sink, number, now.number)

    def last(self, newest: At) -> str | None:
        """The newest one that is there. Raises InvariantBroken: it is not what was sealed."""
        for at, before, name in self._last(newest):
            text = (self._store.get(name) or b"").decode()
            if At(at.number - 1, before).then(text) != at:
                raise InvariantBroken("SEAL_FILE_CHANGED", number=at.number, name=name)
            return text
        return None

    def texts(self, newest: At, first: int) -> Iterator[str]:
        """The seals from a number on. One that is missing is left out: the check of the chain finds that."""
        return (text for _, text in self._chain(newest, first))

    def holds(self, newest: At, at: At) -> bool:
        """Whether a seal is in the chain that ends with `newest`."""
        return any(found == at for found, _, _ in self._names(newest, at.number))

    def _is(self, newest: At, number: int, text: str) -> bool:
        return next((kept == text for at, kept in self._chain(newest, number) if at.number == number), False)

    def _chain(self, newest: At, first: int) -> Iterator[tuple[At, str]]:
        names = self._names(newest, first)[::-1]
        with ThreadPoolExecutor(min(_PARALLEL, len(names) or 1)) as pool:
            contents = pool.map(self._store.get, [name for *_, name in names])
            for (at, _, _), data in zip(names, contents, strict=True):
                if data is not None:
                    yield at, data.decode()

    def _last(self, newest: At) -> list[_Found]:
        return self._names(newest, newest.number) or self._names(newest, 0)

    def _names(self, newest: At, first: int) -> list[_Found]:
        """Files of the chain, newest first, down to a number."""
        found: list[_Found] = []
        files: dict[int, list[_Found]] = {}
        wanted: int | None = newest.digest
        for number in range(newest.number, max(first, 0) - 1, -1):
            if number == newest.number or (number + 1) % _BLOCK == 0:
                files = self._listed(number // _BLOCK)
            fitting = [f for f in files.get(number, ()) if wanted in (None, f[0].digest)]
            if not fitting:
                wanted = None
                continue
            at, wanted, name = fitting[0]
            found.append((at, wanted, name))
        return found

    def _listed(self, block: int) -> dict[int, list[_Found]]:
        files: dict[int, list[_Found]] = {}
        for name in sorted(self._store.files(f"{self._folder}/{block:07d}")):
            parts = name.rpartition("/")[2].removesuffix(".json").split("-")
            if len(parts) == 3 and parts[0].isdigit() and name.endswith(".json"):
                number = int(parts[0])
                files.setdefault(number, []).append((At(number, int(parts[1], 16)), int(parts[2], 16), name))
        return files

    def _name(self, at: At, before: At) -> str:
        return f"{self._folder}/{at.number // _BLOCK:07d}/{at.number:010d}-{at.digest:016x}-{before.digest:016x}.json"
