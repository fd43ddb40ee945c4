"""The pipelines of a ledger, without their files: what their decisions and owners tell.

A file with `ledger: {format: postgres, url: ..., dbtable: ...}` names the place, in the options of a sink to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from delivered.engine.context import open_ledger
from delivered.model.errors import UsageError
from delivered.model.identity import Scope
from delivered.model.patience import within
from delivered.model.secrets import shown
from delivered.operate.state import SinkStatus, Status
from delivered.operate.status import ASK_S_MAX, of_ledger
from delivered.pipeline.endpoint import Endpoint, as_text
from delivered.pipeline.file import load_yaml
from delivered.pipeline.spec import NO_INCARNATION

KEY = "ledger"
_NOBODY = "-"


def statuses(file: Path) -> list[Status]:
    """Of every pipeline and sink in the ledger, each with its newest decision of any checkpoint.

    Raises:
        UsageError: the file names no sink.
        DeliveredError: the ledger did not answer.
    """
    given = load_yaml(file.read_text(encoding="utf-8"))[KEY]
    if not isinstance(given, Mapping) or "format" not in given:
        raise UsageError(
            "LEDGER_FILE",
            f"{file}: {KEY!r} is {shown(given)}; it must be the options of a sink to the place that holds the ledger.",
            next_step="write ledger: {format: postgres, url: ..., dbtable: ...}",
        )
    endpoint = Endpoint(given["format"], {k: as_text(k, v) for k, v in given.items() if k != "format"})
    sink = endpoint.sink()
    with within(ASK_S_MAX):
        with contextlib.closing(open_ledger(sink, Scope(_NOBODY, _NOBODY, NO_INCARNATION))) as ledger:
            found = ledger.others()
        return [_status(sink, endpoint.system, o.pipeline, o.sink) for o in sorted(found, key=str)]


def _status(sink: Any, system: str, pipeline: str, name: str) -> Status:
    with contextlib.closing(open_ledger(sink, Scope(pipeline, name, NO_INCARNATION))) as ledger:
        state = ledger.look()
    last = state.last or next(iter(state.earlier), None)
    guarantee = last.guarantee.value if last is not None else ""
    return Status(pipeline, guarantee, "", **of_ledger(state, last, [SinkStatus(name, system, 0, 0)]))
