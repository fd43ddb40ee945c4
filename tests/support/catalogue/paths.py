"""Every path of the catalogue, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from tests.support.catalogue import formats, kafka, messages, tables
from tests.support.catalogue.run import Path
from tests.support.catalogue.tables import UPSERT

Make = Callable[[pytest.FixtureRequest], Path]


def _server(name: str) -> dict[str, Make]:
    make = {"postgres": tables.postgres, "mysql": tables.mysql}[name]
    return {
        f"{name} {mechanism} {mode}": partial(make, mechanism=mechanism, **(UPSERT if mode == "upsert" else {}))
        for mechanism in ("one_transaction", "two_phase")
        for mode in ("append", "upsert")
    }


TABLES: dict[str, Make] = {
    "sqlite append": tables.sqlite,
    "sqlite upsert": partial(tables.sqlite, **UPSERT),
    **_server("postgres"),
    **_server("mysql"),
    "delta append": tables.delta,
    "delta upsert": partial(tables.delta, **UPSERT),
    "iceberg append": tables.iceberg,
    "iceberg upsert": partial(tables.iceberg, **UPSERT),
    **{f"files {kind}": partial(tables.files, kind=kind) for kind in ("parquet", "json", "csv")},
}
KEY = {"mode": "upsert", "keyColumns": "v"}
ROLES: dict[str, Make] = {
    **{
        f"{make.__name__} upsert key": tables.by_value(make, twice=True, **KEY)
        for make in (tables.sqlite, tables.delta, tables.iceberg)
    },
    **{
        f"{make.__name__} {mechanism} upsert key": tables.by_value(make, twice=True, mechanism=mechanism, **KEY)
        for make in (tables.postgres, tables.mysql)
        for mechanism in ("one_transaction", "two_phase")
    },
    "delta partition": tables.by_value(tables.delta, partitionBy="v"),
    **{
        f"iceberg partition by {name}": tables.by_value(tables.iceberg, partitionBy=text)
        for name, text in {
            "value": "v", "bucket": "bucket(4, v)", "truncate": "truncate(7, v)", "years": "years(v)",
            "months": "months(v)", "days": "days(v)", "hours": "hours(v)",
        }.items()
    },
}  # fmt: skip
"""The value is a key, or says into which partition a row goes."""
MESSAGES: dict[str, Make] = {
    **{f"kafka {part}": partial(kafka.part, column=part) for part in ("value", "key", "header", "name")},
    **{
        f"kafka-librdkafka {part}": partial(kafka.part, column=part, client="librdkafka")
        for part in ("value", "key", "header", "name")
    },
    **{f"kafka {name}": partial(formats.formatted, format=name) for name in ("avro", "protobuf", "json_schema")},
    **{f"pulsar {part}": partial(messages.pulsar, column=part) for part in ("header", "name")},
    **{
        f"{make.__name__} {part}": partial(make, column=part)
        for make in (messages.rabbitmq, messages.activemq, messages.pulsar, messages.rocketmq)
        for part in ("value", "key", "message_id")
    },
}
PATHS = {**TABLES, **ROLES, **MESSAGES}
