"""What a checkpoint's state of dedup was made by, kept beside it.

Spark says of a state that does not fit, if it says anything, how its own rows are laid out; and with another `within`
it goes on in silence. So the first start writes the dedup down, and a start that names another one is refused.
"""

from __future__ import annotations

import json

from delivered.checkpoint import folder
from delivered.model import record_format
from delivered.model.dedup import Dedup
from delivered.model.errors import InvariantBroken, Refused

FILE = "delivered/dedup.json"


def kept(location: str) -> Dedup | None:
    """What the checkpoint's state was made by; None: it has none.

    Raises:
        InvariantBroken: the file is damaged.
        Unreachable: the checkpoint cannot be read.
    """
    text = folder.read(location, FILE)
    if text is None:
        return None
    try:
        found = record_format.known(json.loads(text), "a dedup's settings")["dedup"]
        return None if found is None else Dedup.from_json(found)
    except (ValueError, KeyError, TypeError) as error:
        raise InvariantBroken(
            "DEDUP_DAMAGED",
            f"{FILE!r} of the checkpoint {location!r} holds {text[:80]!r}; it must be what the first start of the "
            "pipeline wrote.",
            next_step="restore the file from the checkpoint's backup",
        ) from error


def changed(location: str, dedup: Dedup | None, sink: str = "") -> str | None:
    """What a checkpoint began with, for people, if the pipeline names another dedup now; else None.

    Args:
        sink: that decides; a table of keys lies in its database.
    """
    before = kept(location)
    if before is None:
        return None if dedup is None else "no dedup"
    at = _sink(location) if before.in_table else sink
    if dedup is not None and dedup.remembers_as(before) and at == sink:
        return None
    return f"dedup {before.says}" + f" of the database of sink {at!r}" * before.in_table


def _sink(location: str) -> str:
    """In whose database the table lies."""
    return str(json.loads(folder.read(location, FILE) or "{}").get("sink", ""))


def keep(location: str, dedup: Dedup | None, *, fresh: bool, sink: str = "") -> None:
    """Write down what the state is made by, before there is any.

    Args:
        sink: that decides.
        fresh: no query ran on this checkpoint yet; what a start that failed left there is replaced.

    Raises:
        Refused: the checkpoint began with another one. The plan says so before; here nothing can get past it.
    """
    before = changed(location, dedup, sink)
    if before is None:
        return
    if not fresh:
        raise Refused("DEDUP_CHANGED", f"The checkpoint {location!r} began with {before}.", "name it again")
    place = {"sink": sink} if dedup is not None and dedup.in_table else {}
    record = record_format.numbered({"dedup": dedup.to_json() if dedup is not None else None, **place})
    data = json.dumps(record, separators=(",", ":"))
    folder.write(location, FILE, data.encode(), first=False)
