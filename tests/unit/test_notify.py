"""Problems are reported to a webhook: a real HTTP server in this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.decided import pipeline
from typer.testing import CliRunner

import delivered
from delivered.cli.main import app
from delivered.model.errors import UsageError
from delivered.operate import notify
from delivered.operate.notify import Notifier, notifying
from delivered.operate.status import Driver, Problem, Status
from delivered.pipeline.definition import Webhook

TOKEN = "s3cr3t-t0ken"
BLOCKED = Problem("DELIVERED_TRANSACTION_BLOCKS", "a < b & it hides 42 offsets.", "end it", "billing-7")
LATE = Problem("DELIVERED_STALLED", "No batch was decided.", None)
AWAY = Problem("DELIVERED_KAFKA_UNREACHABLE", "No broker answered.", "start it")


class Hook:
    """A server that keeps what is posted, and answers with `codes`, then 200."""

    def __init__(self) -> None:
        self.posted: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.codes: list[int] = []
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                code = hook.codes.pop(0) if hook.codes else 200
                if code == 200:
                    hook.posted.append(json.loads(body))
                    hook.paths.append(self.path)
                self.send_response(code)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/services/{TOKEN}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    one = Hook()
    monkeypatch.setenv("HOOK", one.url)
    yield one
    one.close()


def seen(*problems: Problem) -> Status:
    return Status("clean", "exactly_once", "/c", Driver.RUNNING, problems=problems)


def notifier(folder: Path, **webhook: str) -> Notifier:
    return Notifier("clean", str(folder), Webhook.of({"webhook": "env:HOOK", **webhook}))


def events(hook: Hook) -> list[tuple[str, str]]:
    return [(p["event"], p["code"].removeprefix("DELIVERED_")) for p in hook.posted]


def test_once_when_it_appears_and_once_when_it_has_ended(hook: Hook, tmp_path: Path) -> None:
    watcher = notifier(tmp_path)
    watcher.look(seen(BLOCKED))
    watcher.look(seen(replace(BLOCKED, text="It hides 99 offsets."), LATE))
    notifier(tmp_path).look(seen(BLOCKED, LATE))  # after a restart, and of a second watcher
    assert events(hook) == [("problem", "TRANSACTION_BLOCKS"), ("problem", "STALLED")]
    notifier(tmp_path).look(seen(LATE))
    notifier(tmp_path).look(seen(LATE))
    assert events(hook)[2:] == [("ended", "TRANSACTION_BLOCKS")]
    watcher.look(seen(LATE, BLOCKED))
    assert events(hook)[3:] == [("problem", "TRANSACTION_BLOCKS")], "again"
    first = hook.posted[0]
    assert (first["pipeline"], first["about"], first["next"]) == ("clean", "billing-7", "end it")
    assert hook.paths[0] == f"/services/{TOKEN}"


def test_two_of_a_kind_are_two(hook: Hook, tmp_path: Path) -> None:
    watcher = notifier(tmp_path)
    watcher.look(seen(BLOCKED, replace(BLOCKED, about="import-9")))
    watcher.look(seen(replace(BLOCKED, about="import-9")))
    assert [(p["event"], p["about"]) for p in hook.posted] == [
        ("problem", "billing-7"), ("problem", "import-9"), ("ended", "billing-7"),
    ]  # fmt: skip


def test_two_watchers_report_each_change_once(hook: Hook, tmp_path: Path) -> None:
    one, other = notifier(tmp_path), notifier(tmp_path)
    one.look(seen(LATE))
    one.look(seen())
    other.look(seen(LATE))
    for _ in range(3):
        one.look(seen())
    assert [e for e, _ in events(hook)] == ["problem", "ended"] * 2
    now = seen()
    one.look(replace(now, problems=(LATE,), asked_ms=now.asked_ms + 2))
    other.look(replace(now, asked_ms=now.asked_ms + 1))
    assert [e for e, _ in events(hook)][4:] == ["problem"], "it was asked before the problem was seen"
    other.look(replace(now, asked_ms=now.asked_ms + 3))
    assert [e for e, _ in events(hook)][4:] == ["problem", "ended"]


def test_behind_a_server_that_is_away_nothing_has_ended(hook: Hook, tmp_path: Path) -> None:
    watcher = notifier(tmp_path)
    watcher.look(seen(BLOCKED))
    watcher.look(seen(AWAY))
    assert events(hook) == [("problem", "TRANSACTION_BLOCKS"), ("problem", "KAFKA_UNREACHABLE")]
    watcher.look(seen())
    assert {e for e, _ in events(hook)[2:]} == {"ended"} and len(hook.posted) == 4


def test_a_server_in_trouble_is_tried_again_within_a_bound(
    hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notify, "NOTIFY_TRIES_MAX", 3)
    watcher = notifier(tmp_path)
    hook.codes = [503, 429]
    for _ in range(4):
        watcher.look(seen(LATE))
    assert events(hook) == [("problem", "STALLED")]
    hook.codes = [500] * 3
    for _ in range(5):
        watcher.look(seen(LATE, BLOCKED))
    assert hook.codes == [] and len(hook.posted) == 1, "given up after three"
    watcher.look(seen(LATE))
    assert len(hook.posted) == 1, "nobody was told that it began"
    hook.codes = [404]
    watcher.look(seen(LATE, AWAY))
    watcher.look(seen(LATE, AWAY))
    assert len(hook.posted) == 1, "a refusal is final"
    assert "HTTP 404" in caplog.text and "env:HOOK" in caplog.text
    assert TOKEN not in caplog.text and TOKEN not in (tmp_path / notify.FILE).read_text()


def test_a_message_that_was_not_sent_survives_a_restart(hook: Hook, tmp_path: Path) -> None:
    hook.codes = [503]
    notifier(tmp_path).look(seen(LATE))
    notifier(tmp_path).look(seen(LATE))
    assert events(hook) == [("problem", "STALLED")]


def test_no_server_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("HOOK", f"http://127.0.0.1:1/{TOKEN}")
    notifier(tmp_path).look(seen(LATE))
    assert "Connection refused" in caplog.text and TOKEN not in caplog.text
    monkeypatch.setenv("HOOK", f"ftp://host/{TOKEN}")
    notifier(tmp_path).look(seen(LATE))
    assert "refers to no http:// or https:// address" in caplog.text and TOKEN not in caplog.text
    monkeypatch.delenv("HOOK")
    notifier(tmp_path / "other").look(seen(LATE))
    assert "HOOK" in caplog.text


def test_formats(hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for format_ in ("slack", "teams"):
        watcher = notifier(tmp_path / format_, format=format_)
        watcher.look(seen(BLOCKED))
        watcher.look(seen())
    slack, slack_ended, teams, teams_ended = hook.posted
    assert slack == {"text": "*clean: DELIVERED_TRANSACTION_BLOCKS*\na &lt; b &amp; it hides 42 offsets.\nNext: end it"}
    assert slack_ended["text"].startswith("*clean: ended: DELIVERED_TRANSACTION_BLOCKS*")
    assert "Next" not in slack_ended["text"]
    (card,) = teams["attachments"]
    assert (teams["type"], card["contentType"]) == ("message", "application/vnd.microsoft.card.adaptive")
    assert [b["text"] for b in card["content"]["body"]][1:] == [BLOCKED.text, "Next: end it"]
    assert len(teams_ended["attachments"][0]["content"]["body"]) == 2
    monkeypatch.setenv("ROUTING", TOKEN)
    watcher = notifier(tmp_path / "pagerduty", format="pagerduty", key="env:ROUTING")
    watcher.look(seen(BLOCKED))
    watcher.look(seen())
    trigger, resolve = hook.posted[4:]
    assert (trigger["event_action"], resolve["event_action"]) == ("trigger", "resolve")
    assert trigger["dedup_key"] == resolve["dedup_key"] and trigger["routing_key"] == TOKEN
    assert trigger["payload"]["severity"] == "error" and BLOCKED.text in trigger["payload"]["summary"]
    assert TOKEN not in (tmp_path / "pagerduty" / notify.FILE).read_text()


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        ({"webhook": f"https://hooks.example/{TOKEN}"}, "reference"),
        ({"webhook": "env:HOOK", "format": "fax"}, "format"),
        ({"webhook": "env:HOOK", "format": "pagerduty"}, "routing key"),
        ({"webhook": "env:HOOK", "key": "env:KEY"}, "other formats take none"),
        ({"webhook": "env:HOOK", "format": "pagerduty", "key": TOKEN}, "reference"),
    ],
)
def test_a_wrong_entry_is_refused_without_its_secret(entry: dict[str, str], code: str) -> None:
    with pytest.raises(UsageError, match=code) as refused:
        Webhook.of(entry)
    assert TOKEN not in str(refused.value)


def test_watch_prints_and_reports(hook: Hook, tmp_path: Path) -> None:
    made = pipeline(tmp_path)
    Path(made.sinks[0].options["path"]).write_bytes(b"not a database, and not an empty file" * 40)
    definition = {
        "pipeline": "orders", "guarantee": "exactly_once", "checkpoint": "checkpoint",
        "source": {"format": "log", "path": "in"}, "sinks": [{"format": "sqlite", "path": "out.db", "table": "orders"}],
        "notify": {"webhook": "env:HOOK"},
    }  # fmt: skip
    (tmp_path / "orders.yaml").write_text(yaml.safe_dump(definition))
    for _ in range(2):
        done = CliRunner().invoke(app, ["watch", str(tmp_path), "--looks", "1"])
        assert done.exit_code == 0, done.output
    assert len(hook.posted) == 1 and hook.posted[0]["event"] == "problem"
    Path(made.sinks[0].options["path"]).unlink()
    done = CliRunner().invoke(app, ["watch", str(tmp_path), "--looks", "1", "-o", "json"])
    assert json.loads(done.stdout)["event"] == "ended"
    assert len(hook.posted) == 2


def test_a_run_that_fails_reports_why(hook: Hook, tmp_path: Path) -> None:
    made = pipeline(tmp_path)
    made.notify = Webhook.of({"webhook": "env:HOOK"})
    Path(made.sinks[0].options["path"]).write_bytes(b"not a database, and not an empty file" * 40)
    with pytest.raises(delivered.DeliveredError), notifying(made):
        raise delivered.DeliveredError("STALLED", "x")
    assert [p["pipeline"] for p in hook.posted] == ["orders"]
    with notifying(made):
        pass
    assert len(hook.posted) == 1
