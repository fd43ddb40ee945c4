"""The columns of a table as PostgreSQL's log gives them with its rows, and what differs between two of them.

A row in the log has the columns that the table had when it was written, whatever the table has by now. So a batch of a
change stream has rows of one shape, except that columns may be added to it: a row from before has null there, as in the
table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from delivered.connectors.outbox.pgoutput import Relation

Column = tuple[str, int, int, bool]
"""Name, oid of its type, modifier of the type, and whether it belongs to the replica identity."""
Shape = tuple[Column, ...]


def of_relation(relation: Relation) -> Shape:
    return tuple(zip(relation.columns, relation.types, relation.modifiers, relation.keys, strict=True))


def restored(value: Sequence[Sequence[Any]] | None) -> Shape | None:
    """From offsets, as JSON; None: no row was read yet, or by a release that did not keep it."""
    return None if value is None else tuple((str(n), int(t), int(m), bool(k)) for n, t, m, k in value)


def names(shape: Shape) -> tuple[str, ...]:
    return tuple(column[0] for column in shape)


def added(before: Shape, after: Shape) -> frozenset[str] | None:
    """Columns that `after` has more, if nothing else differs; None: something does."""
    more = frozenset(names(after)) - frozenset(names(before))
    return more if tuple(c for c in after if c[0] not in more) == before else None


def differences(before: Shape, after: Shape, type_name: Callable[[int, int], str]) -> list[str]:
    """What changed, in words: "the column name was renamed to title".

    Args:
        type_name: oid and modifier of a type -> its name.
    """
    old, new = {c[0]: c for c in before}, {c[0]: c for c in after}
    lost, more = [n for n in old if n not in new], [n for n in new if n not in old]
    found = []
    for name in list(lost):
        at = names(before).index(name)
        if len(before) == len(after) and after[at][0] in more and after[at][1:3] == before[at][1:3]:
            found.append(f"the column {name} was renamed to {after[at][0]}")
            lost.remove(name)
            more.remove(after[at][0])
    found += [f"the column {name} was dropped" for name in lost]
    found += [f"the column {name} was added" for name in more]
    for name in set(old) & set(new):
        if old[name][1:3] != new[name][1:3]:
            types = " to ".join(type_name(*c[1:3]) for c in (old[name], new[name]))
            found.append(f"the type of the column {name} changed from {types}")
    identities = [", ".join(c[0] for c in shape if c[3]) or "nothing" for shape in (before, after)]
    if identities[0] != identities[1] and {c[0] for c in before if c[3]} - set(lost) != {c[0] for c in after if c[3]}:
        found.append(f"the replica identity changed from {identities[0]} to {identities[1]}")
    return found or ["the order of the columns changed"]
