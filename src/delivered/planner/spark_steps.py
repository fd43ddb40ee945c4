"""The steps of a batch that Spark itself runs, the same for every mechanism."""

from __future__ import annotations

from delivered.model.step import Step, StepId
from delivered.planner.request import Request

AGAIN = "nothing is visible; the batch runs again"


def read_step(request: Request, on_crash: str) -> Step:
    replay = "replayable by offset" if request.source.capability.replayable else "not replayable"
    return Step(StepId.SOURCE_READ, f"{request.source.label}, {replay}", on_crash)


def log_step(on_crash: str = "nothing; the next batch runs") -> Step:
    return Step(StepId.LOG, "Spark's own commit log", on_crash)
