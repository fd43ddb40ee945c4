"""Topic and group as a queue of the contract, with their preflight check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from delivered.connectors.rocketmq.options import RocketmqOptions
from delivered.connectors.rocketmq.receiver import MISSING, RocketmqReceiver
from delivered.contract.finding import Finding
from delivered.contract.queue import Receiver
from delivered.model.errors import DeliveredError, Unreachable, UsageError


@dataclass(frozen=True)
class RocketmqQueue:
    """
    Attributes:
        seen: not empty once topic and group were found: for a while after a restart, servers know neither.
    """

    options: RocketmqOptions
    seen: list[bool] = field(default_factory=list, compare=False, repr=False)

    @property
    def name(self) -> str:
        return f"{self.options.topic} ({self.options.group})"

    @property
    def redelivers_after_s(self) -> float:
        return self.options.invisible_s

    def assumes(self) -> tuple[str, ...]:
        options = self.options
        ids = (
            "senders set one unique key per message, and the same one when they resend it"
            if options.by_key
            else "message ids are unique, and a message resent with another id is a new one (a process forked after "
            "its client had started repeats its parent's ids: set idFrom=keys)"
        )
        return (
            ids,
            f"the group {options.group} redelivers often enough (retryMaxTimes, 16 unless set): after that, "
            "RocketMQ moves a message to the group's dead letters (%DLQ%), and it does not reach the log",
            "brokers run with popConsumerKVServiceEnable=true: else they can forget messages that arrive within five "
            "seconds after a receiver ended (seen with 5.5.0; `delivered receive` warns)",
            f"the topic {options.topic} keeps messages for longer than receivers may be down (fileReservedTime)",
        )

    def preflight(self) -> Sequence[Finding]:
        try:
            receiver = RocketmqReceiver(self.options)
        except DeliveredError as error:
            return [Finding.refusal(error)]
        try:
            return list(self._findings(receiver))
        finally:
            receiver.close()

    def receiver(self) -> Receiver:
        try:
            made = RocketmqReceiver(self.options)
        except UsageError as error:
            if self.seen and error.code in MISSING:
                raise Unreachable("ROCKETMQ_UNREACHABLE", error.message, error.next_step) from error
            raise
        self.seen[:] = [True]
        return made

    def _findings(self, receiver: RocketmqReceiver) -> Iterator[Finding]:
        if receiver.takes_fifo and not receiver.ordered:
            yield Finding(
                "GROUP_NOT_ORDERED",
                f"The topic {self.options.topic!r} is FIFO but the group {self.options.group!r} is not ordered: "
                "messages of a message group may enter the log out of order.",
                False,
                f"mqadmin updateSubGroup -g {self.options.group} -o true",
            )
