"""Tells a webhook of a pipeline's problems: once when one appears, and once when it has ended.

What was reported is kept in the checkpoint, so neither a restart nor a second watcher repeats it. A process that dies
between the webhook's answer and that record repeats one message; PagerDuty recognises it by its key.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from pyarrow import fs

from delivered import checkpoint
from delivered.model.answers import TimedAnswer
from delivered.model.errors import DeliveredError, UsageError, without_passwords
from delivered.model.limits import CONNECT_TIMEOUT_S, NOTIFY_EVERY_S, NOTIFY_TRIES_MAX
from delivered.model.options import resolve_secret
from delivered.model.work import without_format
from delivered.operate.asking import status
from delivered.operate.status import Problem, Status, unanswered
from delivered.pipeline.definition import Definition, Webhook

log = logging.getLogger("delivered.notify")

FILE, _LOCK = "delivered/notified.json", "delivered/notified.lock"
_KEPT_MAX = 1_000
_OVERTAKEN_MS_MAX = 60_000
"""By which a status is older than another watcher's, which it must not undo. Beyond it, the clocks of two machines
differ."""


@dataclass(frozen=True)
class Message:
    """What is reported of one problem.

    Attributes:
        since_ms: when it was first seen, in milliseconds since 1970.
        has_ended: it is there no more.
    """

    pipeline: str
    code: str
    about: str
    text: str
    next_step: str
    since_ms: int
    has_ended: bool = False

    @property
    def key(self) -> str:
        """The same for the same problem, as long as it lasts."""
        name = json.dumps([self.pipeline, self.code, self.about]).encode()
        return hashlib.blake2b(name, digest_size=16).hexdigest()

    @property
    def title(self) -> str:
        return f"{self.pipeline}: {'ended: ' if self.has_ended else ''}{self.code}"

    @property
    def since(self) -> str:
        return datetime.fromtimestamp(self.since_ms / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")

    def to_json(self) -> dict[str, Any]:
        event = "ended" if self.has_ended else "problem"
        what = {"pipeline": self.pipeline, "code": self.code, "about": self.about, "text": self.text}
        return {"event": event, **what, "next": self.next_step, "since": self.since}

    @classmethod
    def of(cls, pipeline: str, problem: Problem) -> Self:
        next_step = problem.next_step or ""
        return cls(pipeline, problem.code, problem.about, problem.text, next_step, time.time_ns() // 1_000_000)


# Bodies, as each service reads them.


def _plain(message: Message, _: str | None) -> dict[str, Any]:
    return {**message.to_json(), "host": socket.gethostname()}


def _slack(message: Message, _: str | None) -> dict[str, Any]:
    escaped = {n: _escaped(getattr(message, n)) for n in ("title", "text", "next_step")}
    lines = [f"*{escaped['title']}*", escaped["text"]]
    if message.next_step and not message.has_ended:
        lines.append(f"Next: {escaped['next_step']}")
    return {"text": "\n".join(lines)}


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _teams(message: Message, _: str | None) -> dict[str, Any]:
    lines = [(message.title, {"weight": "Bolder"}), (message.text, {})]
    if message.next_step and not message.has_ended:
        lines.append((f"Next: {message.next_step}", {"fontType": "Monospace"}))
    body = [{"type": "TextBlock", "text": text, "wrap": True, **style} for text, style in lines]
    card = {"$schema": "http://adaptivecards.io/schemas/adaptive-card.json", "type": "AdaptiveCard", "version": "1.4"}
    attached = {"contentType": "application/vnd.microsoft.card.adaptive", "content": {**card, "body": body}}
    return {"type": "message", "attachments": [attached]}


def _pagerduty(message: Message, key: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "routing_key": key,
        "event_action": "resolve" if message.has_ended else "trigger",
        "dedup_key": message.key,
    }
    if message.has_ended:
        return found
    summary = f"{message.title}: {message.text}"[:1024]
    details = {"next": message.next_step, "about": message.about, "since": message.since}
    source = f"{message.pipeline} on {socket.gethostname()}"
    return {**found, "payload": {"summary": summary, "source": source, "severity": "error", "custom_details": details}}


_BODIES: Mapping[str, Callable[[Message, str | None], dict[str, Any]]] = {
    "json": _plain,
    "slack": _slack,
    "teams": _teams,
    "pagerduty": _pagerduty,
}


class Refusal(Exception):
    """The webhook refuses this message, whatever is tried."""


def send(webhook: Webhook, message: Message) -> None:
    """Post one message.

    Raises:
        Refusal: an answer that a retry does not change.
        OSError, http.client.HTTPException: no answer, or that of a server that is in trouble.
        UsageError: a reference to a secret leads nowhere.
    """
    key = None if webhook.key is None else resolve_secret("notify.key", webhook.key)
    body = json.dumps(_BODIES[webhook.format](message, key)).encode()
    parts = urlsplit(resolve_secret("notify.webhook", webhook.url))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError("NOTIFY_URL", reference=webhook.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=CONNECT_TIMEOUT_S)
    connection.response_class = TimedAnswer
    path = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
    with contextlib.closing(connection):
        connection.request("POST", path, body, {"Content-Type": "application/json", "User-Agent": "delivered"})
        code = connection.getresponse().status
    if code == 429 or code >= 500:
        raise OSError(f"HTTP {code}")
    if not 200 <= code < 300:
        raise Refusal(f"HTTP {code}")


@dataclass(frozen=True)
class Reported:
    """A problem that lasts, or whose end is not reported yet.

    Attributes:
        is_sent: the webhook has its last message: that it appeared, or that it ended.
        tries: of that message.
    """

    message: Message
    is_sent: bool = False
    tries: int = 0

    @property
    def is_given_up(self) -> bool:
        return self.tries >= NOTIFY_TRIES_MAX


class Notifier:
    """Of one pipeline. Args: webhook: None: nothing is sent; `look` only returns what is new."""

    def __init__(self, name: str, location: str, webhook: Webhook | None) -> None:
        self._name, self._location, self._webhook = name, location, webhook
        self._known: dict[str, Reported] = {}
        self._is_kept = True

    def look(self, now: Status) -> list[Message]:
        """Report what appeared and what ended since the last look. Never raises.

        Returns:
            Messages that are new, sent or not.
        """
        with self._alone():
            before, asked_ms = self._load()
            if 0 < asked_ms - now.asked_ms < _OVERTAKEN_MS_MAX:
                return []
            changed = self._changes(before, now)
            known = before | changed
            for key in [k for k, r in known.items() if not r.is_sent and not r.is_given_up]:
                known[key] = self._sent(known[key])
            over = [k for k, r in known.items() if r.message.has_ended and (r.is_sent or r.is_given_up)]
            self._known = {k: r for k, r in known.items() if k not in over}
            if self._known != before or not self._is_kept:
                self._is_kept = self._store(now.asked_ms)
        return [r.message for r in changed.values()]

    def _changes(self, known: Mapping[str, Reported], now: Status) -> dict[str, Reported]:
        found = {(m := Message.of(self._name, p)).key: m for p in now.problems}
        # What is asked behind a server that does not answer is unknown, not ended.
        ended = {} if unanswered(now) else {k: r for k, r in known.items() if k not in found}
        return {
            **{k: Reported(m) for k, m in found.items() if k not in known or known[k].message.has_ended},
            **{
                # The end of a problem that was never reported is not reported either.
                k: Reported(replace(r.message, has_ended=True), is_sent=not r.is_sent)
                for k, r in ended.items()
                if not r.message.has_ended
            },
        }

    def _sent(self, reported: Reported) -> Reported:
        if self._webhook is None:
            return replace(reported, is_sent=True)
        tries = reported.tries + 1
        try:
            send(self._webhook, reported.message)
        except (Refusal, UsageError) as error:
            log.warning("%s was not reported to %s: %s", reported.message.title, self._webhook.url, _why(error))
            return replace(reported, tries=NOTIFY_TRIES_MAX)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if tries in (1, NOTIFY_TRIES_MAX):
                again = "" if tries == NOTIFY_TRIES_MAX else "; it is tried again"
                title = reported.message.title
                log.warning("%s was not reported to %s: %s%s", title, self._webhook.url, _why(error), again)
            return replace(reported, tries=tries)
        return replace(reported, is_sent=True, tries=tries)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Without another watcher of this machine. A checkpoint in an object store has no locks."""
        filesystem, path = checkpoint.open_folder(self._location)
        with contextlib.ExitStack() as stack:
            if isinstance(filesystem, fs.LocalFileSystem):
                with contextlib.suppress(OSError):  # one who may only read it
                    file = Path(path) / _LOCK
                    file.parent.mkdir(parents=True, exist_ok=True)
                    fcntl.flock(stack.enter_context(file.open("ab")), fcntl.LOCK_EX)
            yield

    def _load(self) -> tuple[dict[str, Reported], int]:
        """What is kept, and when the status was asked that it is of. If that cannot be read or written: as this process
        knows it."""
        try:
            text = checkpoint.read(self._location, FILE) if self._is_kept else None
            if text is not None:
                found = without_format(json.loads(text), "notifications")
                known = [Reported(Message(**r["message"]), r["is_sent"], r["tries"]) for r in found["problems"]]
                return {r.message.key: r for r in known}, int(found["asked_ms"])
        except (DeliveredError, ValueError, KeyError, TypeError) as error:
            log.debug("earlier notifications cannot be read: %s", error)
        return self._known, 0

    def _store(self, asked_ms: int) -> bool:
        listed = [asdict(r) for r in self._known.values()][-_KEPT_MAX:]
        try:
            checkpoint.write_record(self._location, FILE, {"problems": listed, "asked_ms": asked_ms})
        except (DeliveredError, OSError) as error:
            log.debug("notifications were not kept: %s", error)
            return False
        return True


def _why(error: Exception) -> str:
    """Without the address, which is a secret of its own."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, DeliveredError):
        return without_passwords(error.message)
    return str(error) if str(error).startswith("HTTP ") else type(error).__name__


@contextlib.contextmanager
def notifying(pipeline: Definition) -> Iterator[None]:
    """Look at a pipeline and report its problems, on a thread, as long as the body runs; once more if it fails."""
    notifier, stop = Notifier(pipeline.name, pipeline.checkpoint, pipeline.notify), threading.Event()

    def watch() -> None:
        while not stop.wait(NOTIFY_EVERY_S):
            notifier.look(status(pipeline))

    thread = threading.Thread(target=watch, daemon=True, name="delivered-notify")
    thread.start()
    try:
        yield
    except BaseException as error:
        stop.set()
        thread.join(CONNECT_TIMEOUT_S)
        if isinstance(error, Exception):
            notifier.look(status(pipeline))
        raise
    finally:
        stop.set()
