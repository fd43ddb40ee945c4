"""Whether this table can keep the promise. Writes one small file beside its data, and takes it away again."""

from __future__ import annotations

import uuid

from delivered.connectors.iceberg.client import catalog, data_path, explained, open_table, require_table, store
from delivered.connectors.iceberg.options import IcebergOptions
from delivered.connectors.iceberg.target import check_features
from delivered.contract.finding import Finding
from delivered.kits.table import modes
from delivered.model.errors import DeliveredError
from delivered.model.guarantee import Guarantee


def preflight(options: IcebergOptions, guarantee: Guarantee) -> list[Finding]:
    finding = modes.refused(options.write, guarantee)
    if finding is not None:
        return [finding]
    try:
        catalog(options)
        table = open_table(options)
        if table is None and not options.create:
            require_table(options)
        if table is not None:
            check_features(options, table)
            with explained(options):
                files = store(table, data_path(table))
                probe = f"delivered/probe-{uuid.uuid4().hex}"
                files.put(probe, b"may this user write here?")
                files.remove([probe])
    except DeliveredError as error:
        return [Finding.refusal(error)]
    return []
