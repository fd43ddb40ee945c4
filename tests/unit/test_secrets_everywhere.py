"""A secret in any option of any connector reaches no plan, report, status, page, error, lineage event or log."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from delivered.cli.main import app
from delivered.contract.connector import Connector
from delivered.entry import Pipeline
from delivered.model.errors import DeliveredError, UsageError, is_secret, redacted, shown, without_passwords
from delivered.model.options import Option, OptionTable, option
from delivered.model.options import Options as Declared
from delivered.model.step import JsonLines
from delivered.operate.asking import look
from delivered.operate.lineage import Lineage
from delivered.operate.page import look_with_flow, page
from delivered.patterns.saga import Log
from delivered.pipeline.definition import Definition
from delivered.pipeline.endpoint import Endpoint, datasets, endpoint
from delivered.pipeline.registry import connectors, find_sink, find_source
from delivered.planner import to_json

SECRET = "hunt/er+2"
URLS = (f"s3://key:{SECRET}@bucket/x", f"https://host/x?password={SECRET}")


def tables() -> Iterator[tuple[Connector, str, OptionTable]]:
    for found in connectors().values():
        for role in ("source", "sink"):
            table = getattr(found, f"{role}_options")
            if table is not None:
                yield found, role, table


def places() -> Iterator[tuple[str, str, OptionTable, Option]]:
    """Each option, and one of a client's library for each prefix."""
    for found, role, table in tables():
        for each in table.options:
            yield found.name, role, table, each
        for prefix in table.passthrough:
            yield found.name, role, table, Option(f"{prefix}some.setting", "")


def required(table: OptionTable) -> dict[str, str]:
    return {o.name: o.example or "x" for o in table.options if o.required}


def entry(system: str, given: dict[str, str]) -> str:
    return json.dumps({"format": system, **given})


def file_of(folder: Path, number: int, system: str, role: str, given: dict[str, str]) -> Path:
    """A pipeline with this source or sink. JSON is YAML."""
    source = entry(system, given) if role == "source" else entry("log", {"path": str(folder / "log")})
    sink = entry(system, given) if role == "sink" else entry("sqlite", {"path": str(folder / "db"), "table": "t"})
    path = folder / f"{number}.yaml"
    head = f"pipeline: p{number}\nguarantee: at_least_once\ncheckpoint: {folder}/c{number}\n"
    path.write_text(f"{head}source: {source}\nsinks: [{sink}]\n", encoding="utf-8")
    return path


def test_a_password_in_a_url_is_refused_in_every_option(tmp_path: Path) -> None:
    files, said = list[Path](), list[str]()
    for system, role, table, each in places():
        if each.secret or is_secret(each.name):
            continue
        find = find_source if role == "source" else find_sink
        for url in URLS:
            given: Any = {**required(table), each.name: url}
            with pytest.raises(UsageError, match="PASSWORD_IN_URL") as declared:
                endpoint(system, **given)
            with pytest.raises(UsageError, match="PASSWORD_IN_URL") as parsed:
                find(system, given)
            said += [f"{caught.value} {caught.value!r}" for caught in (declared, parsed)]
        if each.name in (table.options[0].name, table.options[-1].name) or each not in table.options:
            files.append(file_of(tmp_path, len(files), system, role, given))
    assert len(said) > 1_000
    shown = [page(look_with_flow(files)), json.dumps([s.to_json() for s in look(files)])]
    for command in ("plan", "status", "report", "audit", "run"):
        for output in ("text", "json"):
            done = CliRunner().invoke(app, [command, str(files[0]), "--output", output])
            assert done.exit_code != 0
            shown.append(done.stdout + done.stderr)
    assert all("PASSWORD_IN_URL" in text for text in shown[:2])
    assert not any(SECRET in text for text in (*said, *shown))


def test_no_secret_option_is_shown(tmp_path: Path) -> None:
    """Literal passwords are taken; nothing that describes the pipeline has them."""
    tried, shown = 0, list[str]()
    for system, role, table, each in places():
        if not (each.secret or is_secret(each.name)):
            continue
        for value in (SECRET, URLS[0]):
            given: Any = {**required(table), each.name: value}
            made = endpoint(system, **given)
            shown += [repr(made), made.label]
            with suppress(DeliveredError):
                shown.append(repr(made.source() if role == "source" else made.sink()))
            with suppress(DeliveredError):
                shown += map(str, datasets(made))
            try:
                plan = Pipeline.from_file(file_of(tmp_path, tried, system, role, given)).plan(offline=True)
                shown += [str(plan), repr(plan), json.dumps(to_json(plan)), plan._repr_html_()]
            except DeliveredError as error:
                shown.append(f"{error} {error!r}")
            tried += 1
    assert tried >= 20
    assert not any(SECRET in text for text in shown)


def test_a_failing_connection_shows_no_secret(tmp_path: Path) -> None:
    given = {"url": "postgresql://me@127.0.0.1:1/d", "dbtable": "t", "password": SECRET}
    file = file_of(tmp_path, 0, "postgres", "sink", given)
    shown = [page(look_with_flow([file])), json.dumps([s.to_json() for s in look([file])])]
    assert "UNREACHABLE" in shown[1]
    assert not any(SECRET in text for text in shown)


@pytest.mark.parametrize("url", URLS)
def test_neither_checkpoint_nor_saga_log_holds_a_password(url: str, tmp_path: Path) -> None:
    log, sink = Endpoint("log", {"path": "l"}), Endpoint("sqlite", {"path": "p", "table": "t"})
    for key in ("checkpoint", "master"):
        given: Any = {"checkpoint": str(tmp_path), key: url}
        with pytest.raises(UsageError, match="PASSWORD_IN_URL") as caught:
            Definition(name="p", guarantee="exactly_once", source=log, sinks=[sink], **given)
        assert SECRET not in str(caught.value)
    for command in ("create", "list", "run"):
        done = CliRunner().invoke(app, ["sagas", command, *(["m:s"] if command == "run" else []), "--log", url])
        assert done.exit_code == 2
        assert "PASSWORD_IN_URL" in done.stderr + done.stdout or command == "run"
        assert SECRET not in done.stdout + done.stderr
    done = CliRunner().invoke(app, ["sagas", "create", "--log", str(tmp_path / "s.db"), "--password", SECRET])
    assert (done.exit_code, SECRET in done.stdout + done.stderr) == (2, False)
    assert SECRET not in repr(Log("postgresql://h/d", SECRET))


def test_what_failed_is_sent_as_lineage_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openlineage.client")
    sent = list[str]()
    monkeypatch.setattr("delivered.operate.lineage._emit", lambda make: sent.append(repr(make())))
    monkeypatch.setattr("delivered.operate.lineage.configured", lambda: None)
    pipeline = Definition.from_file(
        file_of(tmp_path, 0, "sqlite", "sink", {"path": str(tmp_path / "db"), "table": "t"})
    )
    Lineage(pipeline, "01890000-0000-7000-8000-000000000000").ended({}, f"IOException: {URLS[0]}: password={SECRET}")
    assert len(sent) == 1
    assert "IOException" in sent[0]
    assert SECRET not in sent[0]


def test_logs_and_errors_show_no_secret() -> None:
    logger, stream = logging.getLogger("delivered.test"), io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger.addHandler(handler)
    with closing(handler):
        try:
            raise ValueError(URLS[0])
        except ValueError:
            logger.exception("no answer from %s, password=%s", URLS[1], SECRET)
        logger.removeHandler(handler)
    assert "no answer" in stream.getvalue()
    assert SECRET not in stream.getvalue()
    error = DeliveredError("X", f"see {URLS[0]}", f"open {URLS[1]}")
    assert SECRET not in f"{error} {error!r} {error.args}"


class _Toy(Declared, owner="toy source"):
    place: str = option("place", "Where.", default="x")


def test_a_new_connector_need_not_think_of_it() -> None:
    with pytest.raises(UsageError, match="PASSWORD_IN_URL"):
        _Toy.parse({"PLACE": URLS[0]})
    assert _Toy.parse({"place": "http://host:80/a@b"}).place == "http://host:80/a@b"
    assert _Toy.parse({"place": "https://host/?token=env:NAME"}).place.endswith("env:NAME")


NAMES = [
    "Authorization", "header.authorization", "X-Api-Key", "aws_session_token", "sas_token", "azure_storage_sas_key",
    "conn_string", "azure_storage_connection_string", "AccountKey", "SharedAccessKey", "sse_customer_key", "passcode",
    "Cookie", "sasl.jaas.config",
]  # fmt: skip
TEXTS = [
    "Authorization: Bearer {s}", "{{'authorization': 'Basic {s}'}}", "got Bearer {s}", "https://h/x?X-Amz-Signature={s}&b=1",
    "https://h/?sv=1&sig={s}", "Endpoint=sb://h;SharedAccessKeyName=n;SharedAccessKey={s}", "AccountKey={s}",
    "me:{s}@host:9092", "me:{s}@host/db", "redis://:{s}@host/0", "jdbc:mysql://h/d?user=a&password={s}",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_that_hold_a_secret(name: str) -> None:
    hidden = "c2VjcmV0c2VjcmV0c2VjcmV0"
    nested = {"outer": [{name: hidden, "b": {name.upper(): [hidden]}}], name.lower(): {"x": hidden}}
    assert is_secret(name)
    assert hidden not in str(redacted({name: hidden})) + shown(hidden, name) + shown(nested) + shown(
        [nested, hidden], name
    )


@pytest.mark.parametrize("text", TEXTS)
def test_texts_that_hold_a_secret(text: str) -> None:
    hidden = "c2VjcmV0c2VjcmV0c2VjcmV0"
    assert hidden not in without_passwords(text.format(s=hidden))


@pytest.mark.matrix
def test_a_password_without_a_scheme_is_in_no_error() -> None:
    for system, role, table, each in places():
        if each.secret or is_secret(each.name):
            continue
        find = find_source if role == "source" else find_sink
        for value in ("me:hunt3r2@host:x/y", "https://h/x?sig=hunt3r2"):
            try:
                find(system, {**required(table), each.name: value})
            except DeliveredError as error:
                assert "hunt3r2" not in str(error), (system, role, each.name, str(error))
