"""Executor side: one file per shard, in a folder that readers ignore."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from delivered.connectors.files import FilesOptions, Places, StagedFile, failed, formats, take_away
from delivered.contract.sink import Writer
from delivered.kits.table.durable import make_folder, sync
from delivered.kits.table.shard import while_staging
from delivered.model import ranges
from delivered.model.errors import InvariantBroken
from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Work
from delivered.model.ranges import fitted
from delivered.model.work import Handle, Promise


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
        ranges.check(f"a {self._options.format} file", batch, ranges.unstorable(self._options.range, batch))
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
    try:
        with while_staging(work):
            yield
    except OSError as error:
        raise failed(options, error) from error
