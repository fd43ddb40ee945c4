"""Sagas as a sink: one row is one saga, keyed by its id."""

from __future__ import annotations

from delivered.connectors.saga.options import SagaOptions
from delivered.contract.connector import Connector, Factory

CONNECTOR = Connector(
    "saga",
    "saga",
    sinks=Factory(SagaOptions, "delivered.connectors.saga.sink:SagaSink"),
    external_ledger=True,
    instead="read the rows that the sagas were made of",
)
