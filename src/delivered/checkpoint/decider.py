"""The sink whose ledger decides the batches of a pipeline with several sinks, stored in the checkpoint's sidecar.

A pipeline without that sink asks another ledger, which may lack the newest batch: it would be written again.
"""

from __future__ import annotations

import json

from delivered.checkpoint import folder
from delivered.model import record_format
from delivered.model.errors import InvariantBroken

FILE = "delivered/deciding-sink.json"


def decider(location: str) -> str | None:
    """Name of the sink that decided for several sinks when the query was last started; None: it never had several.

    Raises:
        InvariantBroken: the file is damaged.
        Unreachable: the checkpoint cannot be read.
    """
    text = folder.read(location, FILE)
    if text is None:
        return None
    try:
        return str(record_format.known(json.loads(text), "a checkpoint's deciding sink")["sink"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvariantBroken(
            "DECIDING_SINK_DAMAGED",
            f"{FILE!r} of the checkpoint {location!r} contains {text[:80]!r}; it must be what a start of the pipeline "
            "wrote.",
            next_step="restore the file from the checkpoint's backup",
        ) from error


def keep_decider(location: str, sink: str, *, several: bool) -> None:
    """Store which sink decides. Runs on the driver, before the query starts. May be called again.

    Raises:
        Unreachable: the checkpoint cannot be written to.
    """
    before = decider(location)
    if sink != before and (several or before is not None):
        text = json.dumps(record_format.numbered({"sink": sink}), separators=(",", ":"))
        folder.write(location, FILE, text.encode(), first=False)
