"""The sink whose ledger decides the batches of a pipeline with several sinks, stored in the checkpoint's sidecar.

A pipeline without that sink asks another ledger, which may lack the newest batch: it would be written again.
"""

from __future__ import annotations

from delivered.checkpoint import folder

FILE = "delivered/deciding-sink.json"


def decider(location: str) -> str | None:
    """Name of the sink that decided for several sinks when the query was last started; None: it never had several.

    Raises:
        InvariantBroken: the file is damaged.
        Unreachable: the checkpoint cannot be read.
    """
    what = "a checkpoint's deciding sink"
    return folder.read_record(location, FILE, what, lambda found: str(found["sink"]), "DECIDING_SINK_DAMAGED")


def keep_decider(location: str, sink: str, *, several: bool) -> None:
    """Store which sink decides. Runs on the driver, before the query starts. May be called again.

    Raises:
        Unreachable: the checkpoint cannot be written to.
    """
    before = decider(location)
    if sink != before and (several or before is not None):
        folder.write_record(location, FILE, {"sink": sink})
