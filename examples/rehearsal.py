"""`python -m examples.rehearsal [CASE...]`: what somebody on call sees, and how soon, when a pipeline is in trouble.

A pipeline from Kafka and RabbitMQ to Kafka under load, beside it `delivered metrics`, `delivered ui`, `delivered watch`
with a webhook, and a real Prometheus with the alert rules of deploy/. Each trouble is made on purpose, looked for in
all five places, mended by the command that they name, and looked for until it is gone. Then every expression of the
rules and of the dashboard is evaluated. Writes build/rehearsal.json; exit code 1 if something was not seen within 15 s,
or did not go away.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pika
import psutil
import yaml
from benchmarks import origin
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from delivered.checkpoint import history
from delivered.connectors.kafka.topics import id_prefix
from delivered.machine import cache_folder
from delivered.pipeline.definition import SEALS_LATE, Definition
from delivered_lab import brokers
from delivered_lab.brokers.servers import fetch_packages, free_ports

SEEN_WITHIN_S = 15.0
GONE_WITHIN_S = 90.0
AUDITED_WITHIN_S = 240.0
"""Of an audit in Spark that starts for it, with all this beside it."""
RECORDS_PER_S = 200
AUDIT_EVERY_S = 60
BUILD = Path("build")
DEPLOY = Path(__file__).parents[1] / "deploy"
TOKEN = "DELIVERED_UI_TOKEN"
RULES, DASHBOARD = DEPLOY / "prometheus-alerts.yml", DEPLOY / "grafana-dashboard.json"
HOOK = "REHEARSAL_WEBHOOK"
PLACES = ("metrics", "status", "page", "webhook", "alert")
FALLING_S = 75.0
"""Until the lag has grown for a minute, with the time that batches take."""
BLOCKS_S = 20.0
"""15 s, or three batches of this machine."""
FLOOD_PER_S = 4_000
BATCH_MAX = 2_000
ROW_BYTES_MAX = 100_000


@dataclass(frozen=True)
class Seen:
    """
    Attributes:
        seen_on: place -> seconds from the trouble until it was seen there.
        gone_after_s: seconds from the mending command until it was seen nowhere.
        due_s: seconds from the trouble until it is one by definition.
    """

    case: str
    code: str
    seen_on: dict[str, float]
    mended_by: str
    gone_after_s: float
    due_s: float = 0.0

    @property
    def seconds(self) -> float:
        """From then on."""
        return max(0.0, max(self.seen_on.values()) - self.due_s)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seen_on": sorted(self.seen_on), "seen_after_s": self.seen_on, "seconds": self.seconds}


def fetched(url: str, method: str = "GET") -> str:
    asked = urllib.request.Request(url, method=method, headers={"Authorization": f"Bearer {os.environ[TOKEN]}"})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return str(answer.read().decode())


def prometheus() -> Path:
    """The program, from Debian's package."""
    root = fetch_packages("prometheus", cache_folder() / "prometheus" / "debian", ["prometheus"], "31 MB", print)
    return root / "usr" / "bin" / "prometheus"


class Load(threading.Thread):
    """Sends records to Kafka at a steady rate, whatever happens to the broker, and a tenth as many to RabbitMQ."""

    def __init__(self, bootstrap: str, rabbitmq: str) -> None:
        super().__init__(daemon=True)
        self._producer = Producer({"bootstrap.servers": bootstrap, "log_level": 0})
        self._queue = pika.BlockingConnection(pika.URLParameters(rabbitmq)).channel()
        self._queue.queue_declare("calls", durable=True, arguments={"x-queue-type": "quorum"})
        self.ended = threading.Event()
        self.per_s = RECORDS_PER_S

    def send(self, value: bytes) -> None:
        """One record more."""
        self._producer.produce("orders", value=value)

    def run(self) -> None:
        number = 0
        while not self.ended.wait(0.1):
            for _ in range(self.per_s // 10):
                with contextlib.suppress(BufferError):
                    self._producer.produce("orders", key=str(number), value=f"order {number}")
                number += 1
            for n in range(RECORDS_PER_S // 100):
                self._queue.basic_publish("", "calls", b"call", pika.BasicProperties(message_id=f"{number}-{n}"))
            self._producer.poll(0)


class Webhook(http.server.ThreadingHTTPServer):
    """Keeps which problems were reported, and have not ended."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Hook)
        self.open: set[tuple[str, str]] = set()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Hook(http.server.BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = told["code"], told["about"]
        self.server.open.add(key) if told["event"] == "problem" else self.server.open.discard(key)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


class Watch:
    """The five places."""

    def __init__(
        self, file: Path, metrics_port: int, ui_port: int, prometheus_port: int, alerts: bool, webhook: Webhook
    ) -> None:
        self._file, self._webhook = file, webhook
        self._metrics, self._ui = f"http://127.0.0.1:{metrics_port}/metrics", f"http://127.0.0.1:{ui_port}"
        self._prometheus = f"http://127.0.0.1:{prometheus_port}/api/v1/alerts"
        self.places = PLACES if alerts else PLACES[:-1]

    def where(self, codes: tuple[str, ...], alerts: tuple[str, ...], seen: Callable[[str], None]) -> None:
        """Look at all places at once, and call `seen` with each that shows one of these problems."""
        looks: dict[str, Callable[[], bool]] = {
            "metrics": lambda: any(f'code="{c}"' in fetched(self._metrics) for c in codes),
            "status": lambda: any(p["code"] in codes for s in self._status() for p in s["problems"]),
            "page": lambda: any(c in fetched(self._ui) for c in codes),
            "webhook": lambda: any(c in codes for c, _ in self._webhook.open),
            "alert": lambda: any(a in alerts for a in self._firing()),
        }

        def look(place: str) -> None:
            if looks[place]():
                seen(place)

        with ThreadPoolExecutor(len(self.places)) as pool:
            list(pool.map(look, self.places))

    def anything(self) -> set[str]:
        problems = [p["code"] for s in self._status() for p in s["problems"]]
        return {*problems, *(self._firing() if "alert" in self.places else ())}

    def keep(self, case: str) -> None:
        """The page as it is now, for `make screenshots`."""
        BUILD.mkdir(exist_ok=True)
        page = BUILD / f"page-{case.replace(' ', '-')}.html"
        page.write_text(fetched(f"{self._ui}/?paused"), encoding="utf-8")

    def _status(self) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "delivered.cli.main", "status", str(self._file), "-o", "json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        found = json.loads(done.stdout)
        if not isinstance(found, list):
            raise RuntimeError(f"delivered status failed: {found}")
        return found

    def _firing(self) -> list[str]:
        alerts = json.loads(fetched(self._prometheus))["data"]["alerts"]
        return [a["labels"]["alertname"] for a in alerts if a["state"] == "firing"]


def until(fact: Callable[[], bool], limit_s: float, what: str) -> float:
    """Seconds until a fact holds."""
    began = time.monotonic()
    while not fact():
        if time.monotonic() - began > limit_s:
            raise TimeoutError(f"{what} within {limit_s:.0f} s")
        time.sleep(0.2)
    return time.monotonic() - began


def rehearse(
    watch: Watch,
    case: str,
    trouble: Callable[[], None],
    codes: tuple[str, ...],
    alerts: tuple[str, ...],
    mended_by: str,
    mend: Callable[[], None],
    due_s: float = 0.0,
    gone_within_s: float = GONE_WITHIN_S,
) -> Seen:
    began = time.monotonic()
    trouble()
    seen: dict[str, float] = {}
    while set(seen) != set(watch.places):
        watch.where(codes, alerts, lambda place: seen.setdefault(place, round(time.monotonic() - began, 1)))
        if time.monotonic() - began > due_s + 4 * SEEN_WITHIN_S:
            raise TimeoutError(f"{case}: {codes} was seen only on {sorted(seen)}")
        time.sleep(0.2)
    print(f"{case}: {codes[0]} seen after {seen}", flush=True)
    watch.keep(case)
    mend()

    def is_over() -> bool:
        shown: list[str] = []
        watch.where(codes, alerts, shown.append)
        return not shown

    gone = until(is_over, gone_within_s, f"{case}: {codes} did not go away")
    print(f"{case}: gone {gone:.1f} s after: {mended_by}", flush=True)
    return Seen(case, codes[0], seen, mended_by, round(gone, 1), due_s)


class Command:
    """`delivered run`, `receive` or `audit`, in a session of its own, so that it can be killed with all below it."""

    def __init__(self, name: str, file: Path, *more: str) -> None:
        self._name, self._file, self._log, self._more = name, file, file.with_name(f"{name}.log"), more
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "delivered.cli.main", self._name, str(self._file), *self._more]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def kill_jvm(self) -> None:
        """As the system does when memory runs out."""
        below = psutil.Process(self.process.pid).children(recursive=True) if self.process is not None else []
        next(p for p in below if p.name() == "java").kill()

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextlib.contextmanager
def beside(*command: str, log: Path) -> Iterator[None]:
    with log.open("ab") as out:
        process = subprocess.Popen([*command], stdout=out, stderr=out)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def evaluated(prometheus_port: int) -> dict[str, Any]:
    """Every expression of the rules and of the dashboard, in Prometheus: how many there are, and which find no data."""
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"][0]["rules"]
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    asked = [(p["title"], t["expr"].replace("$pipeline", ".*")) for p in panels for t in p["targets"]]
    empty: list[str] = []
    for name, expression in [*((r["alert"], r["expr"]) for r in rules), *asked]:
        query = urllib.parse.urlencode({"query": expression})
        answer = json.loads(fetched(f"http://127.0.0.1:{prometheus_port}/api/v1/query?{query}"))
        if answer["status"] != "success":
            raise ValueError(f"{name}: {answer}")
        if not answer["data"]["result"] and (name, expression) in asked:
            empty.append(name)
    return {"rules": len(rules), "panels": len(panels), "panels_without_data": sorted(set(empty))}


def cost(checkpoint: str) -> dict[str, float]:
    """What the reports of batches cost: the time to keep one, as a share of this run's median batch."""
    reports = history.batches(checkpoint)
    took = sorted(sum(r.seconds.values()) for r in reports)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        for _ in range(500):
            history.add(folder, reports[-1])
        each = (time.perf_counter() - began) / 500
    median = took[len(took) // 2]
    return {"report_ms": round(each * 1000, 3), "batch_ms": round(median * 1000, 1), "share": round(each / median, 5)}


def main(chosen: Sequence[str] = ()) -> int:
    os.environ[TOKEN] = secrets.token_urlsafe(24)
    webhook = Webhook()
    os.environ[HOOK] = f"http://127.0.0.1:{webhook.server_port}/"
    folder = Path(tempfile.mkdtemp(prefix="rehearsal-"))
    broker = brokers.start("kafka", folder / "kafka", dies_with_parent=True)
    rabbitmq = brokers.start("rabbitmq", folder / "rabbitmq", dies_with_parent=True)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0})
    topics = [NewTopic("orders", 2, 1), NewTopic("clean", 2, 1), NewTopic("rejected", 1, 1)]
    for future in admin.create_topics(topics).values():
        future.result()
    pipeline = {
        "pipeline": "clean", "guarantee": "exactly_once", "checkpoint": "checkpoint", "trigger": "1 second",
        "sources": {
            "orders": {"format": "kafka", "kafka.bootstrap.servers": broker.bootstrap, "subscribe": "orders",
                       "maxOffsetsPerTrigger": BATCH_MAX},
            "calls": {"format": "rabbitmq", "url": rabbitmq.url, "queue": "calls", "log": str(folder / "log")},
        },
        "transform": {"sql": "SELECT key, value FROM orders UNION ALL SELECT key, value FROM calls"},
        "sinks": [{"format": "kafka", "kafka.bootstrap.servers": broker.bootstrap, "topic": "clean",
                   "kafka.message.max.bytes": ROW_BYTES_MAX}],
        "on_bad_row": "dead_letter",
        "dead_letter": {"format": "kafka", "kafka.bootstrap.servers": broker.bootstrap, "topic": "rejected"},
        "master": "local[2]", "audit": {"every": f"{AUDIT_EVERY_S} s", "share": "100 %"},
        "notify": {"webhook": f"env:{HOOK}"},
    }  # fmt: skip
    file = folder / "clean.yaml"
    file.write_text(yaml.safe_dump(pipeline), encoding="utf-8")
    definition = Definition.from_file(file)
    ports = free_ports(3)
    try:
        program: Path | None = prometheus()
    except Exception as error:
        print(f"no Prometheus here, so alerts are not rehearsed: {error}", file=sys.stderr)
        program = None
    watch = Watch(file, *ports, alerts=program is not None, webhook=webhook)
    cli = (sys.executable, "-m", "delivered.cli.main")
    # Audits run beside the driver, so that they can stop alone.
    driver, receiver = Command("run", file, "--set", "audit.every=1 day"), Command("receive", file)
    auditor = Command("audit", file, "--follow")
    load = Load(broker.bootstrap, rabbitmq.url)
    hanging: list[Producer] = []
    blocking: list[Producer] = []

    def hang() -> None:
        """As a task leaves it that was killed after its first rows, on a machine that never came back."""
        spec = definition.spec
        name = f"{id_prefix(spec.scope(spec.open()))}90.0"
        hanging.append(Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": name, "log_level": 0,
                                 "transaction.timeout.ms": 600_000}))  # fmt: skip
        hanging[-1].init_transactions(30)
        hanging[-1].begin_transaction()
        hanging[-1].produce("clean", value=b"never committed", partition=0)
        hanging[-1].flush(30)

    def abort() -> None:
        """The page's button, once the page has an answer from the brokers."""

        def listed() -> list[str]:
            (found,) = json.loads(fetched(f"http://127.0.0.1:{ports[1]}/status.json"))
            return [t["id"] for t in found["transactions"] if t["id"].endswith("90.0")]

        until(lambda: bool(listed()), SEEN_WITHIN_S, "the page did not list the transaction")
        (name,) = listed()
        fetched(f"http://127.0.0.1:{ports[1]}/end/0/abort/{urllib.parse.quote(name, safe='')}", "POST")

    def block() -> None:
        """As an application that died after its first record, or waits for something else."""
        blocking.append(Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": "billing-7",
                                  "transaction.timeout.ms": 120_000, "log_level": 0}))  # fmt: skip
        blocking[-1].init_transactions(30)
        blocking[-1].begin_transaction()
        blocking[-1].produce("orders", value=b"never committed", partition=0)
        blocking[-1].flush(30)

    def expire_unaudited() -> None:
        auditor.kill()
        expire()

    def expire() -> None:
        """Delete records that were delivered and not sealed, as retention would."""
        (before,) = json.loads(fetched(f"http://127.0.0.1:{ports[1]}/status.json"))
        until(lambda: sum(decided()) > sum(decided(before)), 60, "no batch was decided")
        low = [TopicPartition("orders", n, offset) for n, offset in enumerate(decided())]
        for future in admin.delete_records(low).values():
            future.result()

    def decided(status: Any = None) -> list[int]:
        """Where the newest decided batch ends in each partition of the source."""
        if status is None:
            (status,) = json.loads(fetched(f"http://127.0.0.1:{ports[1]}/status.json"))
        at = status["positions"]["orders"]["orders"]
        return [int(at[n]) for n in sorted(at)]

    results: list[Seen] = []
    with contextlib.ExitStack() as stack:
        for end in (rabbitmq.stop, broker.stop, receiver.kill, driver.kill, auditor.kill, load.ended.set):
            stack.callback(end)
        load.start()
        receiver.start()
        until((folder / "log" / "_delta_log").exists, 60, "the receiver did not make its log")
        driver.start()
        auditor.start()
        stack.enter_context(beside(*cli, "metrics", str(file), "--port", str(ports[0]), log=folder / "metrics.log"))
        page = ("ui", str(file), "--port", str(ports[1]), "--token", f"env:{TOKEN}")
        stack.enter_context(beside(*cli, *page, log=folder / "ui.log"))
        stack.enter_context(beside(*cli, "watch", str(file), "--every", "2", log=folder / "watch.log"))
        if program is not None:
            config = folder / "prometheus.yml"
            scrape = {"job_name": "delivered", "static_configs": [{"targets": [f"127.0.0.1:{ports[0]}"]}]}
            config.write_text(
                yaml.safe_dump(
                    {
                        "global": {"scrape_interval": "5s", "scrape_timeout": "5s", "evaluation_interval": "5s"},
                        "rule_files": [str(RULES.resolve())],
                        "scrape_configs": [scrape],
                    }
                )
            )
            args = (f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}")
            listen = f"--web.listen-address=127.0.0.1:{ports[2]}"
            stack.enter_context(beside(str(program), *args, listen, log=folder / "prometheus.log"))

        def wait_until_quiet(limit_s: float, what: str) -> None:
            shown: set[str] = set()

            def quiet() -> bool:
                nonlocal shown
                with contextlib.suppress(OSError, ValueError, KeyError):
                    shown = watch.anything()
                    return not shown and len(history.batches(definition.checkpoint)) > 2
                return False

            try:
                until(quiet, limit_s, what)
            except TimeoutError as error:
                raise TimeoutError(f"{error}; it shows {sorted(shown)}") from None

        wait_until_quiet(300, "the pipeline did not run without a problem")
        print("the pipeline runs, and nothing is shown", flush=True)
        away = ("DELIVERED_KAFKA_UNREACHABLE", "DELIVERED_KAFKA_NO_ANSWER", "DELIVERED_LEDGER_UNREACHABLE")

        def case(
            name: str, trouble: Callable[[], None], code: str | tuple[str, ...], alert: str, mended_by: str,
            mend: Callable[[], object], due_s: float = 0.0, gone_within_s: float = GONE_WITHIN_S,
        ) -> None:  # fmt: skip
            if chosen and name not in chosen:
                return
            wait_until_quiet(150, f"{name}: the pipeline did not recover from what was before")
            codes = (f"DELIVERED_{code}",) if isinstance(code, str) else code
            results.append(rehearse(watch, name, trouble, codes, (alert,), mended_by, mend, due_s, gone_within_s))

        def look_at_dead_letters() -> None:
            subprocess.run([*cli, "dead-letters", "list", str(file)], check=True, capture_output=True)

        case(
            "a transaction hangs", hang, "TRANSACTION_ORPHANED", "DeliveredTransactionOrphaned",
            "the page's button", abort,
        )  # fmt: skip
        case(
            "another application's transaction blocks the source", block, "TRANSACTION_BLOCKS",
            "DeliveredTransactionBlocks", "its abort", lambda: blocking.pop().abort_transaction(30),
            BLOCKS_S,
        )  # fmt: skip
        case(
            "the driver is killed", driver.kill, "STOPPED_WITH_LAG", "DeliveredNoDecision",
            "delivered run", driver.start,
        )  # fmt: skip
        case(
            "Spark's JVM is killed", driver.kill_jvm, "RUN_FAILED", "DeliveredRunFailed",
            "delivered run", driver.start,
        )  # fmt: skip
        case(
            "a row is rejected", lambda: load.send(b"x" * 2 * ROW_BYTES_MAX), "DEAD_LETTERS", "DeliveredDeadLetters",
            "delivered dead-letters list", look_at_dead_letters,
        )  # fmt: skip
        case(
            "a receiver is killed", receiver.kill, "RECEIVER_GONE", "DeliveredReceiverGone",
            "delivered receive", receiver.start,
        )  # fmt: skip
        case("the broker is down", broker.kill, away, "DeliveredUnreachable", "its restart", broker.restart)
        case(
            "the broker is frozen", lambda: os.kill(broker.pid, signal.SIGSTOP), away, "DeliveredUnreachable",
            "its process continues", lambda: os.kill(broker.pid, signal.SIGCONT),
        )  # fmt: skip
        case(
            "audits stop; counted from the kill", auditor.kill, "SEAL_OLD", "DeliveredSealOld",
            "delivered audit --follow", auditor.start, SEALS_LATE * AUDIT_EVERY_S, AUDITED_WITHIN_S,
        )  # fmt: skip
        case(
            "records expire before an audit", expire_unaudited, "UNSEALED_EXPIRED", "DeliveredUnsealedExpired",
            "delivered audit --follow", auditor.start, 0.0, AUDITED_WITHIN_S,
        )  # fmt: skip
        case(
            "the pipeline falls behind", lambda: setattr(load, "per_s", FLOOD_PER_S), "FALLING_BEHIND",
            "DeliveredFallingBehind", "less load", lambda: setattr(load, "per_s", 0), FALLING_S,
        )  # fmt: skip
        expressions = evaluated(ports[2]) if program is not None else {}
    found = {
        "origin": origin(),
        "cases": [r.to_json() for r in results],
        "expressions": expressions,
        "cost_of_reports": cost(definition.checkpoint),
    }
    (BUILD / "rehearsal.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))
    late = [r.case for r in results if r.seconds > SEEN_WITHIN_S]
    for case in late:
        print(f"{case}: seen later than {SEEN_WITHIN_S:.0f} s after it was due", file=sys.stderr)
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
