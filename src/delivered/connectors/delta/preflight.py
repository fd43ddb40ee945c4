"""Whether this table can keep the promise. Writes one small file beside it, and takes it away again."""

from __future__ import annotations

import uuid

from delivered.connectors.delta.client import Store, explained, open_table, require_table
from delivered.connectors.delta.options import DeltaOptions
from delivered.connectors.delta.target import check_features
from delivered.contract import Finding
from delivered.model.errors import DeliveredError


def preflight(options: DeltaOptions) -> list[Finding]:
    try:
        table = open_table(options)
        if table is None and not options.create:
            require_table(options)
        if table is not None:
            check_features(options, table)
        with explained(options):
            store = Store(options)
            probe = f"_delivered/probe-{uuid.uuid4().hex}"
            store.put(probe, b"may this user write here?")
            store.remove([probe])
    except DeliveredError as error:
        return [Finding.refusal(error)]
    return []
