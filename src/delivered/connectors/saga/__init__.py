"""Sagas as a sink: one row is one saga, keyed by its id."""

from __future__ import annotations

from delivered.contract.connector import Connector, Factory
from delivered.kits.options import PATH, external_ledger, queue_sink_name
from delivered.kits.sql.table import database_url
from delivered.model.options import Options, OptionType, Unfit, integer, option

_URL: OptionType[str] = database_url(
    "postgresql://host/db or mysql://host/db", ("postgresql", "postgres", "mysql", "mariadb"), ("password",)
)


def _where(text: str) -> str:
    return _URL.read(text) if "://" in text else PATH.read(text)


def _place(text: str) -> str:
    module, _, name = text.partition(":")
    if not module or not name:
        raise Unfit.build("OPTION_VALUE.MODULE_NAME", text=text)
    return text


class SagaOptions(Options, owner="delivered_saga sink"):
    """
    Attributes:
        saga: module:name of the declaration.
        log: path of a SQLite file, made absolute, or a URL.
        ledger: path of a SQLite file.
    """

    saga: str = option(
        "saga",
        "Where the saga is declared, as module:name; importable on every executor.",
        OptionType(_place),
        example="shop.sagas:checkout",
    )
    log: str = option(
        "log",
        "The saga log: a SQLite file, or postgresql://host/db or mysql://host/db, without a password.",
        OptionType(_where),
        example="postgresql://localhost/shop",
    )
    password: str | None = option(
        "password", "Password of the log's database.", default=None, secret=True, example="env:DATABASE_PASSWORD"
    )
    threads: int = option("threads", "Sagas that a task runs at the same time.", integer(1, 64), default=4)
    ledger: str = external_ledger()

    @property
    def sink_name(self) -> str:
        return queue_sink_name(f"saga.{self.saga}")


CONNECTOR = Connector(
    "saga",
    "saga",
    sinks=Factory(SagaOptions, "delivered.connectors.saga.sink:SagaSink"),
    external_ledger=True,
    instead="read the rows that the sagas were made of",
)
