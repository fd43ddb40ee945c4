"""An application that keeps accounts as events, and kills itself at a point of one request."""

from __future__ import annotations

import contextlib
import json
import sys
import uuid
from typing import Any

from delivered.patterns.events import Aggregate, DuplicateEvent, Event, new_id
from delivered_lab.verify.applications import Killer, connect, execute


def apply(state: Any, event: Event) -> Any:
    return {"balance": state["balance"] + event.payload["amount"], "events": state["events"] + 1}


ACCOUNT = Aggregate("account", apply, initial={"balance": 0, "events": 0}, snapshot_every=3)


def application(spec: dict[str, Any]) -> None:
    """Requests carry their event's id, so a client that got no answer asks again with the same one."""
    reached, account = Killer(spec), spec["account"]
    connection = connect(spec["dialect"], spec["url"])
    other = connect(spec["dialect"], spec["url"]) if spec["variant"] == "other_transaction" else connection
    for n, given in enumerate(spec["ids"]):
        reached("before", n)
        event = Event(new_id() if spec["variant"] == "id_per_try" else uuid.UUID(given), "deposited", {"amount": n})
        version = ACCOUNT.load(connection, account).version
        with contextlib.suppress(DuplicateEvent):
            ACCOUNT.append(connection, account, [event], expected=version)
            reached("in", n)
            if other is not connection:
                connection.commit()
                reached("in_late", n)
            execute(other, f"UPDATE {spec['balances']} SET total = total + {n}, n = n + 1")
            reached("in_late", n)
            other.commit()
        connection.commit()
        reached("after", n)


if __name__ == "__main__":
    application(json.loads(sys.argv[1]))
