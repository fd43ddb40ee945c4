"""The schema of the sink's topic: what it has, and whether the rows may be written by it."""

from __future__ import annotations

import pyarrow as pa

from delivered.connectors.pulsar.admin import Admin
from delivered.connectors.pulsar.avro import Unmappable
from delivered.connectors.pulsar.encode import Settled, Unfit, derived, settled
from delivered.connectors.pulsar.options import SINK, PulsarSinkOptions
from delivered.model.errors import UsageError


def check_type(options: PulsarSinkOptions, rows: pa.DataType) -> None:
    """Raises UsageError if rows of this type have no schema. Asks no server."""
    try:
        derived(str(options.schema), rows)
    except Unmappable as error:
        raise UsageError(
            "COLUMN_TYPE",
            f"{SINK}: with schema={str(options.schema).lower()}, the column 'value' must be a struct with a "
            f"schema: {error}.",
            next_step="select the fields into it, for instance selectExpr('key', 'struct(*) AS value'), cast or "
            "renamed where the schema needs it",
        ) from None


def settle(admin: Admin, options: PulsarSinkOptions, rows: pa.StructType) -> Settled:
    """By which schema rows are written, as the topic is now. Registers nothing.

    Raises:
        UsageError: they do not fit the registered one.
    """
    known = admin.schema(options.topic)
    try:
        return settled(str(options.schema), rows, known)
    except (Unfit, Unmappable) as error:
        version = "" if known is None else f", version {known.version},"
        raise UsageError(
            "SCHEMA_INCOMPATIBLE",
            f"{SINK}: rows do not fit the schema that is registered for {options.label}{version}: {error}.",
            next_step="cast or rename columns in the transform so that they fit, or write to another topic",
        ) from None


def register(admin: Admin, options: PulsarSinkOptions, rows: pa.StructType) -> None:
    """Let the topic have the schema of the rows.

    Raises:
        UsageError: they do not fit the registered one, or brokers refuse fields that are added.
    """
    from delivered.connectors.pulsar.publish import check_connection

    made = settle(admin, options, rows)
    try:
        check_connection(options, (made.kind, made.text))
    except UsageError as error:
        if error.code != "DELIVERED_SCHEMA_INCOMPATIBLE":
            raise
        what = f"with the fields {', '.join(made.added)} more" if made.added else "of the rows"
        raise UsageError(
            "SCHEMA_INCOMPATIBLE",
            f"{SINK}: the brokers refuse the schema {what} for {options.label}: by the compatibility strategy of the "
            "namespace, or because producers may not register schemas there.",
            next_step="pulsar-admin namespaces get-schema-compatibility-strategy, and get-is-allow-auto-update-schema; "
            "leave these columns out, or let an administrator upload the schema",
        ) from None
