"""Rows into a table, in bounded blocks: by LOAD DATA LOCAL where the server allows it, else by INSERT of many rows.

A block is sent while the server is still at the one before, and asked about when the next one is ready.

LOAD DATA LOCAL does as if IGNORE were written: what breaks a constraint is left out, what does not fit is changed, and
both are only warned of. So a warning is an error here, and so is a row that did not get in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from delivered.connectors.mysql import encode, errors
from delivered.connectors.mysql.options import MysqlOptions
from delivered.model.errors import InvariantBroken

if TYPE_CHECKING:
    from delivered.connectors.mysql.wire import Session


class Loading:
    """Rows of one shard. Inside an open transaction of `session`; used by one thread.

    Args:
        into: the table, quoted for SQL; columns: the rows' columns, quoted, with commas.

    Its methods raise BadRecord for a row that the server does not take as it is, and MySQLError.
    """

    def __init__(self, session: Session, options: MysqlOptions, into: str, columns: str) -> None:
        self._session = session
        self._options = options
        self._sent = 0
        self.rows = 0
        if session.execute("SELECT @@local_infile").fetchone()[0]:
            self._form = encode.LOAD
            self._statement = (
                f"LOAD DATA LOCAL INFILE 'delivered' INTO TABLE {into} CHARACTER SET binary "
                r"FIELDS TERMINATED BY '\t' ESCAPED BY '\\' LINES TERMINATED BY '\n' "
                f"({columns})"
            ).encode()
        else:
            self._form = encode.INSERT
            self._statement = f"INSERT INTO {into} ({columns}) VALUES ".encode()

    def add(self, batch: pa.RecordBatch) -> None:
        """Args: batch: of plain types, with values that the server can hold."""
        for rows, block in encode.blocks(batch, self._form):
            self.end()
            if self._form is encode.LOAD:
                self._session.start(self._statement, block)
            else:
                self._session.start(self._statement + bytes(block[:-1]))
            self._sent = rows

    def end(self) -> None:
        """Wait until the server has what was sent."""
        sent, self._sent = self._sent, 0
        if not sent:
            return
        rows, warnings = self._session.finish()
        if warnings:
            _, number, said = self._session.execute("SHOW WARNINGS LIMIT 1").fetchone()
            raise errors.row_refused(f"{said} (warning {number}, one of {warnings})", self._options)
        if rows != sent:
            raise InvariantBroken(
                "ROWS_DIFFER",
                f"{sent} rows were sent, and the server took {rows}, without a warning.",
                next_step="start the pipeline again; the batch runs again",
            )
        self.rows += rows
