"""The sink `delivered_files`; its writer, one file per shard, in a folder that readers ignore; a scan of the folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from delivered.connectors.files import (
    FORMATS,
    FilesOptions,
    Places,
    StagedFile,
    explained,
    failed,
    formats,
    identity_file,
    schema_file,
    take_away,
)
from delivered.connectors.files.formats import TYPES, check, decode, encoder, stored_schema
from delivered.contract.sink import BoundedScan, Changes, Parts, StoreSink, Writer
from delivered.contract.source import Finding, Offsets, Slice
from delivered.kits.sql.table import untyped
from delivered.kits.table.shard import while_staging
from delivered.kits.table.store import make_folder, packed, put, put_first, sync
from delivered.kits.table.target import comparable, unwritable
from delivered.model.capability import Commit, Guarantee, SinkCapability
from delivered.model.errors import InvariantBroken, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Work
from delivered.model.limits import LEDGER_HISTORY_BATCHES
from delivered.model.rows import check_storable, fitted, unstorable
from delivered.model.work import Handle, Promise


@dataclass(frozen=True)
class FilesSink(StoreSink):
    options: FilesOptions

    parts = Parts(
        __package__,
        writer="sink:writer",
        scan="sink:FolderScan",
        store="store:FilesStore",
        committer="store:FilesCommitter",
    )

    def capability(self) -> SinkCapability:
        return SinkCapability(
            system="files",
            commit=Commit.ONE_TRANSACTION,
            mechanism="rename of the batch's folder",
            stage=f"one {self.options.format} file per shard, in a folder that readers ignore",
            prepare="the file is closed and durable",
            decide="files of all shards and the record in one folder, which is renamed into place",
            apply="nothing to do; the decision made the rows visible",
            send="one folder per shard, renamed into place",
            batch_atomic=True,
            validates=True,
            local=True,
            no_position="",
            assumes=(
                "the folder is on one file system with atomic rename, and is backed up and restored as one",
                "readers ignore names that start with _ (Spark, Hive and Arrow do)",
            ),
            limits=(
                f"decisions of the last {LEDGER_HISTORY_BATCHES} batches are kept",
                "each batch is a folder, with one file per shard",
            ),
        )

    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:
        del guarantee
        probe = self.options.folder / "_delivered" / f"probe-{uuid.uuid4().hex}"
        try:
            put(probe, b"may this user write here?")
            probe.unlink()
        except OSError as error:
            refusal = failed(self.options, error)
            return [Finding.refusal(refusal)]
        return []

    def check_schema(self, schema: pa.Schema) -> None:
        check(self.options, schema)

    def target_check(self) -> Callable[[pa.Schema], None] | None:
        known = stored_schema(self.options)
        return None if known is None else lambda schema: self._check_same(known, comparable(TYPES, schema))

    def _check_same(self, known: pa.Schema, schema: pa.Schema) -> None:
        same = [k.name == f.name and (untyped(f) or k.type == f.type) for k, f in zip(known, schema, strict=False)]
        if not (len(known) == len(schema) and all(same)):
            raise UsageError(
                "SCHEMA_CHANGED.FILES", path=self.options.path, known=_columns(known), columns=_columns(schema)
            )

    def ready_target(self, schema: pa.Schema) -> None:
        schema = TYPES.canonical_schema(schema)
        with explained(self.options):
            known = stored_schema(self.options)
            if known is None:
                make_folder(self.options.folder)
                put(schema_file(self.options), schema.serialize().to_pybytes())
                known = stored_schema(self.options)
            if not identity_file(self.options).exists():
                put_first(identity_file(self.options), uuid.uuid4().hex.encode())
        if known is not None:
            self._check_same(known, schema)

    def invalid_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        return unstorable(self.options.range, batch)

    def refused_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        schema = TYPES.canonical_schema(batch.schema)

        def write(rows: pa.RecordBatch) -> None:
            file = encoder(self.options.format, pa.MockOutputStream(), schema)
            file.write(fitted(rows, schema))
            file.close()

        return unwritable(batch, write)

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return fitted(batch, TYPES.canonical_schema(batch.schema))


def _columns(schema: pa.Schema | None) -> str:
    return "none" if schema is None else ", ".join(f"{f.name} {f.type}" for f in schema)


def writer(options: FilesOptions, work: Work, guarantee: Guarantee, schema: pa.Schema) -> StagingWriter:
    kind = StagingWriter if guarantee is Guarantee.EXACTLY_ONCE else DirectWriter
    return kind(options, work, schema)


class StagingWriter(Writer):
    """exactly_once: a staged file, which the decision moves to the batch's folder."""

    def __init__(self, options: FilesOptions, work: Work, schema: pa.Schema) -> None:
        self._options = options
        self._work = work
        self._schema = formats.TYPES.canonical_schema(schema)
        self._places = Places(options, work.scope)
        self._nonce = uuid.uuid4().hex
        self._path: Path | None = None
        self._file: Any = None
        self._encoder: formats.Encoder | None = None
        self.rows = 0

    def stage(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        check_storable(f"a {self._options.format} file", batch, unstorable(self._options.range, batch))
        with _as_ours(self._options, self._work):
            self._open_file().write(fitted(batch, self._schema))
        self.rows += batch.num_rows

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        if self._encoder is None or self._path is None:
            return Promise()
        with _as_ours(self._options, self._work):
            self._encoder.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            size = self._file.tell()
            self._file.close()
            self._check(fingerprint)
            return Promise(self._keep(self._path, size))

    def abort(self) -> None:
        for each in (self._encoder, self._file):
            with contextlib.suppress(Exception):
                if each is not None:
                    each.close()
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    @property
    def _folder(self) -> Path:
        return self._places.staged(self._work.scope.incarnation)

    def _keep(self, path: Path, size: int) -> Handle | None:
        # A later start may have deleted the file during the write: then its name is missing.
        if not path.exists():
            raise FileNotFoundError(path)
        sync([path.parent])
        return StagedFile(path.name, size, self.rows)

    def _open_file(self) -> formats.Encoder:
        if self._encoder is not None:
            return self._encoder
        work = self._work
        name = f"{work.batch}-{work.shard}-{work.attempt}-{self._nonce}.staged"
        self._path = make_folder(self._folder) / name
        self._file = self._path.open("xb")
        self._encoder = formats.encoder(self._options.format, self._file, self._schema)
        return self._encoder

    def _check(self, fingerprint: Fingerprint) -> None:
        if self.rows != fingerprint.count:
            raise InvariantBroken(
                "ROWS_DIFFER.FILES",
                shard=self._work.shard,
                batch=self._work.batch,
                rows=self.rows,
                count=fingerprint.count,
            )


class DirectWriter(StagingWriter):
    """at_least_once, at_most_once: each shard has its own folder, made visible by its own rename."""

    @property
    def _folder(self) -> Path:
        return self._places.root / "direct" / self._nonce

    def _keep(self, path: Path, size: int) -> Handle | None:
        del size
        work, folder = self._work, path.parent
        path.rename(folder / f"{work.shard:05d}.{self._options.format}")
        sync([folder])
        folder.rename(self._places.shard(work.scope.incarnation, work.batch, work.shard))
        sync([self._options.folder])
        return None

    def abort(self) -> None:
        super().abort()
        take_away(self._folder)


@contextlib.contextmanager
def _as_ours(options: FilesOptions, work: Work) -> Iterator[None]:
    with explained(options), while_staging(work):
        yield


# A scan of all rows of the folder, between batches.

NAMES_MAX = 1_000
"""Files that a position names, because no batch says when they were added."""
_BATCH = re.compile(r"batch=(.+)-(\d{10})(\..*)?/[^/]+")


@dataclass(frozen=True)
class FolderScan(BoundedScan):
    """See `delivered.contract.sink.BoundedScan`. Reads all files that a reader of the folder sees.

    A position is the newest batch of each checkpoint; with the files of those that are not one rename (at_least_once,
    at_most_once), and files of others.
    """

    options: FilesOptions

    def schema(self) -> pa.Schema:
        """Raises UsageError: this package never wrote to the folder."""
        schema = stored_schema(self.options)
        if schema is None:
            raise UsageError("FOLDER_UNKNOWN", path=self.options.path)
        return schema

    def slices(self, since: Offsets | None = None, until: Offsets | None = None) -> Sequence[Slice]:
        """Args: since: {"files": [names]}: excludes these."""
        files = self._files()
        if since is not None and self._same(since):
            files = {name: info for name, info in files.items() if not _lies_before(name, since)}
        if until is not None:
            same = self._same(until)
            files = {name: info for name, info in files.items() if same and _lies_before(name, until)}
        return [Slice(group) for group in packed(files, lambda name: files[name].st_size)]

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        schema = self.schema()
        with explained(self.options):
            for name in piece.data:
                yield from decode(Path(name).suffix[1:], self.options.folder / name, schema)

    def position(self) -> Offsets | None:
        """None: more than `NAMES_MAX` files would have to be named."""
        names = self._files()
        newest: dict[str, int] = {}
        found = {name: match for name in names if (match := _BATCH.fullmatch(name))}
        for match in found.values():
            newest[match[1]] = max(newest.get(match[1], -1), int(match[2]))
        named = [n for n in names if n not in found or (found[n][3] and int(found[n][2]) == newest[found[n][1]])]
        if len(named) > NAMES_MAX:
            return None
        return {"batches": newest, "files": named, "folder": self._identity()}

    def kept(self, position: Offsets) -> Mapping[str, Any]:
        """The number of files, and a hash of their names, sizes and times."""
        before = {name: info for name, info in self._files().items() if _lies_before(name, position)}
        digest = hashlib.blake2b(digest_size=16)
        for name, info in before.items():
            digest.update(f"{name} {info.st_size} {info.st_mtime_ns}\n".encode())
        return {"files": len(before), "digest": digest.hexdigest()}

    def changes(self, position: Offsets, before: Mapping[str, Any] | None) -> Changes:
        path = self.options.path
        if not self._same(position):
            return Changes.deleted(f"folder {path}", recreated=bool(self._identity()))
        now = self.kept(position)
        if before is None or now == before:
            return Changes()
        was, there = before["files"], now["files"]
        if there < was:
            return Changes(altered=(f"folder {path}: {was - there} of {was} files were deleted",))
        if there > was:
            return Changes(altered=(f"folder {path}: {there - was} files were added among {was}",))
        return Changes(altered=(f"folder {path}: some of {was} files are others than before",))

    def _identity(self) -> str | None:
        try:
            return identity_file(self.options).read_text()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise failed(self.options, error) from error

    def _same(self, position: Offsets) -> bool:
        return "folder" not in position or position["folder"] == self._identity()

    def _files(self) -> dict[str, os.stat_result]:
        """Every file that a reader sees, by name, from any writer; batches may be of an earlier `fileFormat`."""
        root = self.options.folder
        files = {}
        with explained(self.options):
            for path in sorted(p for kind in FORMATS for p in root.rglob(f"*.{kind}")):
                name, own = path.relative_to(root), path.suffix[1:] == self.options.format
                if (own or _BATCH.fullmatch(str(name))) and not any(p.startswith(("_", ".")) for p in name.parts):
                    files[str(name)] = path.stat()
        return files


def _lies_before(name: str, position: Offsets) -> bool:
    if name in position.get("files", ()):
        return True
    match = _BATCH.fullmatch(name)
    newest = position.get("batches", {}).get(match[1]) if match else None
    if match is None or newest is None:
        return False
    return int(match[2]) < newest or (int(match[2]) == newest and match[3] is None)
