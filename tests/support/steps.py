"""Which process is at each step, and dies at its crash points."""

from __future__ import annotations

from enum import StrEnum

from delivered.model.step import StepId


class Role(StrEnum):
    """The process at a crash point."""

    DRIVER = "driver"
    TASK = "task"
    RECEIVER = "receiver"
    WORKER = "worker"
    AUDITOR = "auditor"


ROLE_OF_STEP: dict[StepId, Role] = {
    StepId.SOURCE_READ: Role.TASK,
    StepId.DEDUP_NOTE: Role.TASK,
    StepId.RECOVER_CLAIM: Role.DRIVER,
    StepId.RECOVER_CHECK: Role.DRIVER,
    StepId.RECOVER_APPLY: Role.DRIVER,
    StepId.RECOVER_ABORT_ORPHANS: Role.DRIVER,
    StepId.BATCH_BEGIN: Role.DRIVER,
    StepId.WRITE_STAGE: Role.TASK,
    StepId.WRITE_SEND: Role.TASK,
    StepId.WRITE_PREPARE: Role.TASK,
    StepId.WRITE_FLUSH: Role.TASK,
    StepId.DEDUP_KEEP: Role.DRIVER,
    StepId.COMMIT_DECIDE: Role.DRIVER,
    StepId.COMMIT_APPLY: Role.DRIVER,
    StepId.COMMIT_RECORD: Role.DRIVER,
    StepId.LOG: Role.DRIVER,
    StepId.RECEIVE_TAKE: Role.RECEIVER,
    StepId.RECEIVE_PERSIST: Role.RECEIVER,
    StepId.RECEIVE_QUARANTINE: Role.RECEIVER,
    StepId.RECEIVE_ACK: Role.RECEIVER,
    StepId.SAGA_LOG: Role.WORKER,
    StepId.SAGA_CALL: Role.WORKER,
    StepId.AUDIT_READ: Role.AUDITOR,
    StepId.AUDIT_SEAL: Role.AUDITOR,
}
