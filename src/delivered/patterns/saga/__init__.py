"""Sagas: a long transaction as steps, each with what takes it back. Never half done at rest.

    checkout = Saga("checkout", [Step("reserve", reserve, undo=release), Step("pay", Http(url), undo=Http(refund_url))])
    begin(connection, checkout, id="order-7", data={"total": 12})       # in the caller's own transaction
    connection.commit()
    run(Log("sagas.db"), checkout)                                      # until every saga is at rest

After a crash anywhere a saga goes on: forward from the step that was under way if that step takes its key or can be
asked, else backward. Needs neither Spark nor a connector.
"""

from __future__ import annotations

from delivered.patterns.saga.definition import NO_UNDO, Call, Done, Http, Rejected, Saga, Status, Step, Verb
from delivered.patterns.saga.log import DuplicateSaga, Log, begin, ddl
from delivered.patterns.saga.worker import run

__all__ = [
    "NO_UNDO",
    "Call",
    "Done",
    "DuplicateSaga",
    "Http",
    "Log",
    "Rejected",
    "Saga",
    "Status",
    "Step",
    "Verb",
    "begin",
    "ddl",
    "run",
]
