"""When batches start."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from delivered.model.errors import UsageError
from delivered.planner import Trigger

_INTERVAL = re.compile(r"\d+(\.\d+)?\s*[a-zA-Z]+")
_SPARK_NAMES = {
    Trigger.AVAILABLE_NOW: "availableNow",
    Trigger.PROCESSING_TIME: "processingTime",
    Trigger.CONTINUOUS: "continuous",
    Trigger.REAL_TIME: "realTime",
}


@dataclass(frozen=True)
class When:
    """
    Attributes:
        interval: as Spark spells it, "10 seconds"; None with available_now.
    """

    kind: Trigger
    interval: str | None = None

    def for_spark(self) -> dict[str, Any]:
        """Arguments of DataStreamWriter.trigger."""
        return {_SPARK_NAMES[self.kind]: True if self.kind is Trigger.AVAILABLE_NOW else self.interval}


AS_FAST_AS_POSSIBLE = When(Trigger.PROCESSING_TIME, "0 seconds")
AVAILABLE_NOW = When(Trigger.AVAILABLE_NOW)


def parse_trigger(value: str | Mapping[str, Any] | When | None) -> When:
    """Read a trigger: "available_now", "10 seconds", {"processing_time": "10 seconds"}, {"real_time": "1 minute"}.

    Raises:
        UsageError: anything else.
    """
    match value:
        case None:
            return AS_FAST_AS_POSSIBLE
        case When():
            return value
        case str() if value.strip().lower().replace("-", "_") in ("available_now", "availablenow"):
            return AVAILABLE_NOW
        case str() if _INTERVAL.fullmatch(value.strip()):
            return When(Trigger.PROCESSING_TIME, value.strip())
        case Mapping() if len(value) == 1:
            ((key, interval),) = value.items()
            kinds = {k.value: k for k in Trigger if k is not Trigger.AVAILABLE_NOW}
            if key in kinds and isinstance(interval, str) and _INTERVAL.fullmatch(interval.strip()):
                return When(kinds[key], interval.strip())
    raise UsageError(
        "TRIGGER_VALUE",
        f"trigger is {value!r}; it must be available_now, an interval as in '10 seconds', or "
        "{processing_time: '10 seconds'}.",
        next_step="write trigger: available_now to deliver what is there now, then end",
    )
