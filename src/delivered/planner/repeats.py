"""What a plan says of `dedup`: what is known again, what is forgotten, what that costs."""

from __future__ import annotations

from delivered.model.dedup import Dedup
from delivered.model.limits import KEY_TABLE_BYTES, STATE_BYTES_PER_KEY
from delivered.model.step import Step, StepId


def says(dedup: Dedup, system: str = "") -> tuple[str, ...]:
    """One line for each thing worth knowing before the start.

    Args:
        system: of the sink that decides.
    """
    if dedup.in_table:
        return _says_of_table(dedup, system)
    twice = Dedup(dedup.by, 2 * dedup.within_ms).within
    return (
        f"by {dedup.by_text}, before the transform: a record whose {dedup.time} is at most {dedup.within} after that "
        "of the first one of its key is dropped, under every guarantee; the audit counts it, and does not miss it",
        f"forgets: a repeat that comes later than {dedup.within} after the first is a new record as soon as the newest "
        f"{dedup.time} of the batches before is {twice} past the first one's",
        f"late: a record more than {dedup.within} older than the newest of the batches before it is dropped, also if "
        "it is the first of its key; one time in the future makes all that follow late",
        "a record without a key (one of the expressions is null) is no repeat of any other",
        f"state: about {STATE_BYTES_PER_KEY} bytes of executor memory for a key of 36 characters, for every key of the "
        f"last {twice} by {dedup.time}; all rows are shuffled by key",
    )


def _says_of_table(dedup: Dedup, system: str) -> tuple[str, ...]:
    size = KEY_TABLE_BYTES.get(system, max(KEY_TABLE_BYTES.values()))
    return (
        f"by {dedup.by_text}, before the transform: a record whose {dedup.time} is at most {dedup.within} from that of "
        "a delivered one of its key is dropped, under every guarantee; the audit counts it, and does not miss it",
        "remembered in tables beside the ledger: a key counts as seen if and only if the decision of its batch is in",
        f"forgets: a key whose {dedup.time} is more than {dedup.within} before the newest one that the batches before "
        "delivered; a repeat that comes later is a new record. A time in the future counts as the present",
        "late: no record is lost for being late",
        "a record without a key (one of the expressions is null) is no repeat of any other",
        f"costs: about {size} bytes in the database for every key of the last {dedup.within} by {dedup.time}, whatever "
        "its length; each key is looked up once, written twice and deleted twice; all rows are shuffled by key, and "
        "wait in their task until all of its keys are seen",
    )


def with_steps(dedup: Dedup | None, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps of a batch, with those of a table of keys."""
    if dedup is None or not dedup.in_table:
        return steps
    found: list[Step] = []
    for step in steps:
        if step.decides:
            found.append(
                Step(
                    StepId.DEDUP_KEEP,
                    "in the transaction of the decision: keys that were let in count, old ones go",
                    "keys and decision get in together or not at all",
                )
            )
        found.append(step)
        if step.id is StepId.SOURCE_READ:
            found.append(
                Step(StepId.DEDUP_NOTE, "keys that are let in are noted, and count for nothing", step.on_crash)
            )
    return tuple(found)
