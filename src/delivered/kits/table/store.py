"""Files below one folder, on a local disk or in an object store; a ledger's archive and seals of audits in them.

Writes to a local disk are durable: content and names survive a power loss (decision 010).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from delivered.ledger import not_next
from delivered.model.errors import InvariantBroken, Unreachable
from delivered.model.limits import OUTAGE_PATIENCE_S, REQUEST_TIMEOUT_S
from delivered.model.patience import left_s
from delivered.model.work import ENTRY_BYTES, Archive, Archived, Failed, Ok, Outcome

_NO_ANSWER = re.compile(
    r"error sending request|dns error|(could not|failed to) (resolve|lookup|establish)|timed? ?out|network_connection"
    r"|connection ?(error|refused|reset|aborted|closed|failed|lost)|broken ?pipe|slow_?down|service ?unavailable"
    r"|status code: (429|5\d\d)|network is unreachable|no route to host"
    r"|EOF occurred in violation|^(TooManyRequests|Server)Error: |RESTError (408|429|50[0234])\b"  # of a REST catalog
    r"|^(Operational|Interface)Error: \((?!sqlite3\.)",  # of a catalog's database, from SQLAlchemy
    re.IGNORECASE,
)
_REFUSED = re.compile(
    r"169\.254\.|metadata\.google\.internal|token request"  # where clients look for credentials that nobody gave them
    r"|authentication failed|access denied|no pg_hba\.conf entry|(database|role) .* does not exist|unknown database",
    re.IGNORECASE,
)


def find_outage(what: str, error: BaseException) -> Unreachable | None:
    """The outage that an error of an object store's or a catalog's client reports, which ends by itself.

    None: it answered, or the client found no credentials. Judged by the text with the class's name: no client has one
    error for it.

    Args:
        what: for the message: "the table 's3://lake/orders'".
    """
    text = f"{type(error).__name__}: {error}"
    if not _NO_ANSWER.search(text) or _REFUSED.search(text):
        return None
    return Unreachable("STORAGE_UNREACHABLE", what=what, error=text[:500])


def storage_options(path: str, given: Mapping[str, str]) -> dict[str, str] | None:
    """Options of delta-rs for a table. Unless the user says otherwise, requests end with enclosing waits: by itself it
    would ask a silent store for three minutes. None: there are none."""
    if "://" not in path or path.startswith("file:"):
        return dict(given) or None
    longest_s = max(1, round(left_s(OUTAGE_PATIENCE_S)))
    own = {"timeout": f"{min(longest_s, round(REQUEST_TIMEOUT_S))}s", "retry_timeout": f"{longest_s}s"}
    return {**own, **given}


class Store:
    """Files at and below a folder, named relative to it.

    Args:
        fs: Arrow's file system whose root is that folder.
        local: the folder, if it is on a local disk.
    """

    def __init__(self, fs: Any, local: Path | None) -> None:
        self.fs = fs
        self._local = local

    def make_folder(self, folder: str) -> None:
        """Create a local folder and its parents durably. Object stores have no folders."""
        if self._local is not None:
            make_folder(self._local / folder)

    def put(self, name: str, data: bytes) -> None:
        """Create or replace a file atomically."""
        if self._local is None:
            file = self.create(name)
            file.write(data)
            file.close()
            return
        put(self._local / name, data)

    def create(self, name: str) -> Any:
        """Open a new file for writing. In an object store it appears when closed; on a local disk it is not durable."""
        return self.fs.open_output_stream(name)

    def get(self, name: str) -> bytes | None:
        try:
            with self.fs.open_input_stream(name) as file:
                return bytes(file.read())
        except FileNotFoundError:
            return None

    def files(self, folder: str) -> dict[str, int]:
        """Size of every file below a folder, by name."""
        return {f.path.lstrip("/"): f.size for f in self._list(folder, recursive=True) if f.is_file}

    def folders(self, folder: str) -> list[str]:
        """Names of the subfolders of a folder."""
        if self._local is not None:
            return sorted(f.base_name for f in self._list(folder, recursive=False) if not f.is_file)
        start = folder.rstrip("/") + "/"
        parts = {name.removeprefix(start).partition("/") for name in self.files(folder)}
        return sorted({first for first, slash, _ in parts if slash})

    def remove(self, names: Iterable[str]) -> None:
        """Delete files; missing ones are ignored."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self.fs.delete_file(name)

    def sync(self, names: Iterable[str]) -> None:
        """Make local files and their folders durable."""
        if self._local is not None:
            paths = [self._local / name for name in names]
            sync([*paths, *{p.parent for p in paths}])

    def _list(self, folder: str, recursive: bool) -> list[Any]:
        from pyarrow import fs

        infos: list[Any] = self.fs.get_file_info(fs.FileSelector(folder, allow_not_found=True, recursive=recursive))
        return infos


T = TypeVar("T")
SLICE_BYTES = 64 << 20
"""Approximate size of a slice; files are never split."""


def packed(files: Iterable[T], size: Callable[[T], int]) -> list[list[T]]:
    """Group files to about `SLICE_BYTES`, in order; a larger file is a group of its own."""
    groups: list[list[T]] = []
    free = 0
    for file in files:
        if not groups or size(file) > free:
            groups.append([])
            free = SLICE_BYTES
        groups[-1].append(file)
        free -= size(file)
    return groups


FILES_MAX = 16
"""Number of small files before they are compacted."""
FULL_BYTES = 65_536 * ENTRY_BYTES
"""Files of at least this size are not compacted."""


class ArchiveFiles:
    """The archive of a ledger as files. Args: folder: below the store's root; contains nothing else.

    A file is never changed, and is deleted only by a process that has already copied its entries to another file. So a
    driver fenced midway removes nothing from the archive: at worst an entry is stored twice.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder

    def read(self) -> Archive:
        """All entries."""
        while True:
            contents = [self._store.get(name) for name in self._names()]
            if all(data is not None for data in contents):
                return Archive(b"".join(data for data in contents if data is not None), repr(self._folder))
            # Compacted since the listing: another file has its entries.

    def add(self, entries: Iterable[Archived]) -> None:
        """Durable when this returns. May be called again with the same entries."""
        data = b"".join(sorted({e.encode() for e in entries}))
        if not data:
            return
        self._put(data)
        small = {n: size for n, size in self._names().items() if size < FULL_BYTES}
        if len(small) > FILES_MAX:
            self._compact(list(small))

    def _compact(self, names: list[str]) -> None:
        contents = {name: data for name in names if (data := self._store.get(name)) is not None}
        if not contents:  # another process was faster
            return
        compacted = self._put(
            b"".join(sorted({a.encode() for data in contents.values() for a in Archive(data, self._folder)}))
        )
        self._store.remove(name for name in contents if name != compacted)

    def _put(self, data: bytes) -> str:
        """Write a file named by its content hash, so that equal entries give the same file."""
        name = f"{self._folder}/{hashlib.blake2b(data, digest_size=16).hexdigest()}.bin"
        self._store.put(name, data)
        return name

    def _names(self) -> dict[str, int]:
        files = self._store.files(self._folder)
        return {n: size for n, size in files.items() if n.endswith(".bin") and not n.rpartition("/")[2].startswith(".")}


def sync(paths: Iterable[Path]) -> None:
    """fsync files or folders. A file's name is durable when its folder is."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folder(folder: Path) -> Path:
    """Create a folder and its parents durably."""
    missing, path = [], folder
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync([path.parent])
    return folder


def write_new(path: Path, data: bytes) -> None:
    """Create a file in an existing folder. Its content is durable, its name not yet."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def put(path: Path, data: bytes) -> None:
    """Create or replace a file atomically and durably."""
    make_folder(path.parent)
    draft = _draft(path)
    try:
        write_new(draft, data)
        draft.rename(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync([path.parent])


def put_first(path: Path, data: bytes) -> bool:
    """Create a file atomically and durably. Returns False if it exists."""
    make_folder(path.parent)
    draft = _draft(path)
    try:
        write_new(draft, data)
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
        sync([path.parent])
    return True


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def sync_versions(table: Path, first: int, last: int) -> None:
    """fsync the existing commits among first..last, and their folder."""
    folder = table / "_delta_log"
    there = [folder / f"{version:020d}.json" for version in range(max(first, 0), last + 1)]
    sync([*(p for p in there if p.exists()), folder])


def sync_checkpoint(table: Path, version: int) -> None:
    """fsync the checkpoint of one version, `_last_checkpoint`, and their folder."""
    folder = table / "_delta_log"
    sync([*folder.glob(f"{version:020d}.checkpoint*"), folder / "_last_checkpoint", folder])


# Seals of audits as files beside a table, and which of them count.
#
#     <folder>/<number / 1000>/<number>-<hash>-<hash of the seal before it>.json
#
# Object stores behind Arrow's file systems cannot create a file only if it does not exist. So a file alone proves
# nothing: the table's own metadata, which changes by compare-and-set, names the newest seal (`SealPlace`), and each
# file's name the seal before it. Of two audits that wrote a file with one number, one wins that change; the other's
# never counts.

_SEALS_PER_FOLDER = 1000
"""Seals per folder: to find the newest, one folder is listed."""
_SEALS_AT_ONCE = 16


@dataclass(frozen=True)
class SealPlace:
    """
    Attributes:
        number: of a seal; -1: there is none.
        digest: of its text and the digest before it, 63 bits.
    """

    number: int = -1
    digest: int = 0

    def then(self, text: str) -> SealPlace:
        """The seal that follows it, with this text."""
        raw = hashlib.blake2b(f"{self.digest:016x}\n{text}".encode(), digest_size=8).digest()
        return SealPlace(self.number + 1, int.from_bytes(raw, "big") >> 1 or 1)


NO_SEAL = SealPlace()
_SealFile = tuple[SealPlace, int, str]
"""A seal's place, the hash of the one before it, and its file."""


class SealFiles:
    """The files of one sink's chain. Args: folder: below the store's root; contains nothing else."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder

    def add(
        self,
        sink: str,
        number: int,
        text: str,
        newest: Callable[[], SealPlace],
        move: Callable[[SealPlace, SealPlace], Outcome[None]],
    ) -> Outcome[None]:
        """See `delivered.ledger.Store.add_seal`.

        Args:
            newest: reads what the table's metadata names now.
            move: (from, to): names another seal there, if it still names the one before it.
        """
        named = newest()
        before = next((at for at, _, _ in self._last(named)), NO_SEAL)
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

    def last(self, newest: SealPlace) -> str | None:
        """The newest one that is there. Raises InvariantBroken: it is not what was sealed."""
        for at, before, name in self._last(newest):
            text = (self._store.get(name) or b"").decode()
            if SealPlace(at.number - 1, before).then(text) != at:
                raise InvariantBroken("SEAL_FILE_CHANGED", number=at.number, name=name)
            return text
        return None

    def texts(self, newest: SealPlace, first: int) -> Iterator[str]:
        """The seals from a number on. One that is missing is left out: the check of the chain finds that."""
        return (text for _, text in self._chain(newest, first))

    def holds(self, newest: SealPlace, at: SealPlace) -> bool:
        """Whether a seal is in the chain that ends with `newest`."""
        return any(found == at for found, _, _ in self._names(newest, at.number))

    def _is(self, newest: SealPlace, number: int, text: str) -> bool:
        return next((kept == text for at, kept in self._chain(newest, number) if at.number == number), False)

    def _chain(self, newest: SealPlace, first: int) -> Iterator[tuple[SealPlace, str]]:
        names = self._names(newest, first)[::-1]
        with ThreadPoolExecutor(min(_SEALS_AT_ONCE, len(names) or 1)) as pool:
            contents = pool.map(self._store.get, [name for *_, name in names])
            for (at, _, _), data in zip(names, contents, strict=True):
                if data is not None:
                    yield at, data.decode()

    def _last(self, newest: SealPlace) -> list[_SealFile]:
        return self._names(newest, newest.number) or self._names(newest, 0)

    def _names(self, newest: SealPlace, first: int) -> list[_SealFile]:
        """Files of the chain, newest first, down to a number."""
        found: list[_SealFile] = []
        files: dict[int, list[_SealFile]] = {}
        wanted: int | None = newest.digest
        for number in range(newest.number, max(first, 0) - 1, -1):
            if number == newest.number or (number + 1) % _SEALS_PER_FOLDER == 0:
                files = self._listed(number // _SEALS_PER_FOLDER)
            fitting = [f for f in files.get(number, ()) if wanted in (None, f[0].digest)]
            if not fitting:
                wanted = None
                continue
            at, wanted, name = fitting[0]
            found.append((at, wanted, name))
        return found

    def _listed(self, block: int) -> dict[int, list[_SealFile]]:
        files: dict[int, list[_SealFile]] = {}
        for name in sorted(self._store.files(f"{self._folder}/{block:07d}")):
            parts = name.rpartition("/")[2].removesuffix(".json").split("-")
            if len(parts) == 3 and parts[0].isdigit() and name.endswith(".json"):
                number = int(parts[0])
                files.setdefault(number, []).append((SealPlace(number, int(parts[1], 16)), int(parts[2], 16), name))
        return files

    def _name(self, at: SealPlace, before: SealPlace) -> str:
        folder = f"{self._folder}/{at.number // _SEALS_PER_FOLDER:07d}"
        return f"{folder}/{at.number:010d}-{at.digest:016x}-{before.digest:016x}.json"
