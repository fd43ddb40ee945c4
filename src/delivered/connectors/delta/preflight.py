"""Whether this table can keep the promise. Writes one small file beside it, and takes it away again."""

from __future__ import annotations

import uuid

from delivered.connectors.delta.client import Store, explained, open_table, require_table
from delivered.connectors.delta.options import DeltaOptions
from delivered.connectors.delta.target import check_features, check_removes
from delivered.contract.finding import Finding
from delivered.kits.table import modes
from delivered.model.errors import DeliveredError
from delivered.model.guarantee import Guarantee


def preflight(options: DeltaOptions, guarantee: Guarantee) -> list[Finding]:
    finding = modes.refused(options.write, guarantee)
    if finding is not None:
        return [finding]
    try:
        table = open_table(options)
        if table is None and not options.create:
            require_table(options)
        if table is not None:
            check_features(options, table)
            check_removes(options, table)
        with explained(options):
            store = Store(options)
            probe = f"_delivered/probe-{uuid.uuid4().hex}"
            store.put(probe, b"may this user write here?")
            store.remove([probe])
    except DeliveredError as error:
        return [Finding.refusal(error)]
    return []
