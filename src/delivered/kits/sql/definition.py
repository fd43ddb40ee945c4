"""What a table's definition does to rows besides storing them."""

from __future__ import annotations

from dataclasses import dataclass

from delivered.model.capability import WriteMode


@dataclass(frozen=True)
class Definition:
    """What a table's definition does to rows besides storing them.

    Attributes:
        triggers: those that the write mode fires, and rules: those that replace its statements, each with its events.
        loose: key column -> why different keys are equal in it.
        row_security: a policy applies to this user.
        clauses: the table's conflict clauses would skip or replace rows.
        widths, filled: columns with a limit, and those that the server fills; for the plan.
        computed: of `filled`, those that no row may give.
        exists: there is such a table.
    """

    triggers: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    loose: dict[str, str] | None = None
    row_security: bool = False
    clauses: bool = False
    widths: tuple[str, ...] = ()
    filled: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()
    exists: bool = True

    @property
    def loose_keys(self) -> tuple[str, ...]:
        return tuple(self.loose or ())

    @property
    def deceives(self) -> bool:
        """Whether as many rows as were sent may be stored under other keys."""
        return bool(self.triggers or self.rules or self.loose)

    @property
    def suspects(self) -> str:
        """What may have dropped rows, for messages."""
        parts = []
        if self.triggers:
            parts.append(f"triggers: {', '.join(self.triggers)}")
        if self.rules:
            parts.append(f"rules: {', '.join(self.rules)}")
        if self.loose:
            parts.append(f"keys: {listed(self.loose)}")
        if self.row_security:
            parts.append("row-level security applies to this user")
        return "; ".join(parts) or "no triggers, no rules"


def events(mode: WriteMode) -> tuple[str, ...]:
    """Of the statements that a mode runs on the table."""
    updates = mode.upserts and not mode.insert
    deletes = mode.delete is not None or mode.complete
    return ("INSERT", *(("UPDATE",) * updates), *(("DELETE",) * deletes))


def listed(loose: dict[str, str]) -> str:
    """Key columns and why different keys are equal in them, for messages."""
    return ", ".join(f"{column!r} ({why})" for column, why in loose.items())
