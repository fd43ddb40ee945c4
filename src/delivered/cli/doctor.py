"""`delivered doctor`: what a pipeline needs of this machine; every problem comes with its next step.
`delivered explain`: what an error code means, what causes it, and what to run next, from the catalogue.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from delivered.cli.command import Output, OutputOption, console, read, say, say_json, spoken, working
from delivered.model import errors
from delivered.model.errors import EXTRA_OF, PREFIX, Condition, DeliveredError, UsageError, conditions_of, entries

if TYPE_CHECKING:
    from delivered.entry import Pipeline

_DISK_FREE_MIN = 1 << 30
_UNWRAPPED = 1000
"""Characters: in a file or a pipe, a command to copy stays on one line, however long its paths are."""
_LIBRARIES = tuple(
    (distribution, module, extra)
    for module, (distribution, extra) in EXTRA_OF.items()
    if extra not in ("spark", "java") and not module.startswith("_")
)


class Health(StrEnum):
    GOOD = "good"
    MISSING = "missing"
    """Something optional is missing."""
    BAD = "bad"


@dataclass(frozen=True)
class Check:
    name: str
    health: Health
    says: str
    next_step: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"check": self.name, "health": self.health.value, "says": self.says, "next": self.next_step}


def doctor(
    file: Annotated[Path | None, typer.Argument(help="Also check this pipeline's source and sink.")] = None,
    output: OutputOption = Output.TEXT,
) -> int:
    """Check this machine for what a pipeline needs; every problem comes with its next step."""
    with working("checking this machine"):
        checks = examine(read(file, []) if file is not None else None)
    if output is Output.JSON:
        say_json([c.to_json() for c in checks])
    else:
        show(checks)
    return 1 if any(c.health is Health.BAD for c in checks) else 0


def examine(pipeline: Pipeline | None) -> list[Check]:
    """Check this machine, and a pipeline's source and sink. Problems are returned, never raised."""
    checks = [_python(), _java(), _pyspark(), _worker_python(), _class_archive()]
    checks += [_library(*names) for names in _LIBRARIES]
    checks += [_disk(tempfile.gettempdir()), _disk(str(Path.cwd())), _ports(), _host_name(), _workers(pipeline)]
    return spoken([*checks, *(_pipeline(pipeline) if pipeline is not None else ())])


def show(checks: list[Check]) -> None:
    marks = {
        Health.GOOD: Text("ok", "green"),
        Health.MISSING: Text("--", "yellow"),
        Health.BAD: Text("BAD", "bold red"),
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(width=3)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        text = check.says if check.next_step is None else f"{check.says}\nNext: {check.next_step}"
        table.add_row(marks[check.health], Text(check.name), Text(text))  # brackets are not markup
    terminal = console()
    if not terminal.is_terminal:
        terminal.width = _UNWRAPPED
    terminal.print(table)


def _python() -> Check:
    return Check("Python", Health.GOOD, f"{platform.python_version()}, {sys.executable}")


def _java() -> Check:
    from delivered_lab.brokers import java_home

    try:
        home = java_home()
    except DeliveredError as error:
        return Check("Java", Health.BAD, error.message, error.next_step)
    answer = subprocess.run([str(home / "bin" / "java"), "-version"], capture_output=True, text=True, check=False)
    first = (answer.stderr or answer.stdout).splitlines()
    return Check("Java", Health.GOOD, f"{first[0] if first else 'unknown version'}, {home}")


def _pyspark() -> Check:
    try:
        version = importlib.metadata.version("pyspark")
    except importlib.metadata.PackageNotFoundError:
        return Check("pyspark", Health.BAD, "not installed", 'pip install "delivered[spark]"')
    try:
        import delivered.spark  # noqa: F401 - checks the version
    except DeliveredError as error:
        return Check("pyspark", Health.BAD, error.message, error.next_step)
    return Check("pyspark", Health.GOOD, version)


def _class_archive() -> Check:
    make = f"{sys.executable} -m delivered.cli.class_archive"
    try:
        from delivered.spark.session import archive

        file = archive()
    except (DeliveredError, ImportError):
        return Check("quick start", Health.MISSING, "needs Java, pyspark and a cache folder")
    if not file.is_file():
        return Check("quick start", Health.MISSING, "sessions start about 3 s slower than possible", make)
    return Check("quick start", Health.GOOD, f"Spark's class archive is {file}")


def _workers(pipeline: Pipeline | None) -> Check:
    """Settings of the session that a pipeline, or `spark-submit`, would make."""
    from delivered.pipeline.facts import spark_defaults

    try:
        from delivered.spark.check import advice
    except (DeliveredError, ImportError):
        return Check("Python tasks", Health.MISSING, "needs pyspark")
    conf = spark_defaults() | (dict(pipeline.conf) if pipeline is not None else {})
    master = (pipeline.master if pipeline is not None else None) or conf.get("spark.master", "local[*]")
    if master == "local" or master.startswith("local["):
        return Check("Python tasks", Health.GOOD, f"on {master}, delivered.session sets what makes them cheap")
    missing = advice(conf.get)
    if missing:
        return Check(
            "Python tasks",
            Health.MISSING,
            f"on {master}: {' '.join(missing.values())}",
            "set them by --conf or in spark-defaults.conf; docs/spark.md has the figures",
        )
    return Check("Python tasks", Health.GOOD, f"on {master}: local sockets, and workers forked with imports")


def _worker_python() -> Check:
    """Spark's workers run PYSPARK_PYTHON; another minor version cannot unpickle what the driver sends."""
    configured = os.environ.get("PYSPARK_PYTHON")
    if configured is None:
        return Check("PYSPARK_PYTHON", Health.GOOD, "not set; delivered runs its workers with this Python")
    path = shutil.which(configured)
    if path is None:
        return Check(
            "PYSPARK_PYTHON", Health.BAD, f"{configured!r} cannot be run", f"export PYSPARK_PYTHON={sys.executable}"
        )
    code = "import sys, importlib.util as u; print('%d.%d' % sys.version_info[:2], bool(u.find_spec('delivered')))"
    answer = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False).stdout.split()
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    if answer != [own, "True"]:
        problem = (
            f"{path} is Python {answer[0]}, this is {own}"
            if answer and answer[0] != own
            else f"{path} has no delivered"
        )
        return Check("PYSPARK_PYTHON", Health.BAD, problem, f"export PYSPARK_PYTHON={sys.executable}")
    return Check("PYSPARK_PYTHON", Health.GOOD, path)


def _library(distribution: str, module: str, extra: str) -> Check:
    if importlib.util.find_spec(module) is None:
        return Check(distribution, Health.MISSING, "not installed", f'pip install "delivered[{extra}]"')
    return Check(distribution, Health.GOOD, importlib.metadata.version(distribution))


def _disk(folder: str) -> Check:
    name, free = f"disk {folder}", shutil.disk_usage(folder).free
    space = f"{free / (1 << 30):.1f} GiB free"
    if free < _DISK_FREE_MIN:
        return Check(name, Health.BAD, f"{space}; 1 GiB is needed", "free some space, or set TMPDIR to another disk")
    if not os.access(folder, os.W_OK):
        return Check(name, Health.MISSING, f"{space}, not writable", "run from a writable folder")
    return Check(name, Health.GOOD, space)


def _ports() -> Check:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            probe.listen(1)
            with socket.create_connection(("127.0.0.1", port), timeout=2):
                pass
    except OSError as error:
        return Check(
            "127.0.0.1", Health.BAD, f"a local port cannot be used: {error}", "check firewall and sandbox rules"
        )
    return Check("127.0.0.1", Health.GOOD, "local ports can be opened and reached")


def _host_name() -> Check:
    """Spark binds to the address that the host name resolves to."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return Check(
            "host name",
            Health.MISSING,
            f"{name!r} does not resolve; Spark may not start",
            "export SPARK_LOCAL_IP=127.0.0.1",
        )
    return Check("host name", Health.GOOD, f"{name} is {address}")


def _pipeline(pipeline: Pipeline) -> Iterator[Check]:
    from delivered.planner import Refusal

    try:
        answer = pipeline.plan()
    except DeliveredError as error:
        yield Check(f"pipeline {pipeline.name}", Health.BAD, error.message, error.next_step)
        return
    if isinstance(answer, Refusal):
        yield Check(f"pipeline {pipeline.name}", Health.BAD, answer.reason, answer.next_step)
    else:
        summary = f"{answer.guarantee.value} by {answer.mechanism}"
        yield Check(f"pipeline {pipeline.name}", Health.GOOD, "; ".join([summary, *answer.warnings]))


_MEANINGS = {
    "Finding": "Found by the checks before a start, which refuse it or warn",
    "Problem": "Reported by `delivered status`",
    "Reason": "The request is valid but cannot be fulfilled",
    "Unfit": "The request itself is wrong",
}
"""Of what becomes an error later; an error's class says its meaning."""
_ALLOWED = "write what the message says is allowed"


def _meaning(kind: str) -> str:
    """One sentence: what an error of this class says. Empty: the class says nothing."""
    said = _MEANINGS.get(kind) or (getattr(errors, kind).__doc__ or "").partition("\n\n")[0]
    return "" if kind == "DeliveredError" else said.replace("\n   ", "").partition(". ")[0].rstrip(".") + "."


def _shown(template: str) -> str:
    """<name> for each value."""
    return "".join(text + (f"<{name}>" if name else "") for text, name, _, _ in Formatter().parse(template))


def _cause(condition: Condition) -> dict[str, str]:
    message, step = condition.message, condition.next_step
    if condition.kind == "Unfit":  # becomes the error of an option, whose type has an example
        message, step = f"{{owner}}: option {{name}} {message}.", step or _ALLOWED
    step = step or getattr(getattr(errors, condition.kind, None), "usual_step", None) or ""
    meaning = _meaning(condition.kind)
    name = condition.code.partition(".")[2]
    return {"condition": name, "meaning": meaning, "cause": _shown(message), "next": _shown(step)}


def to_json(code: str, entry: dict[str, Any]) -> dict[str, Any]:
    """For programs, and for the reference page. Args: entry: as the catalogue has it."""
    conditions = list(conditions_of(code, entry))
    found = {
        "code": PREFIX + code,
        "meaning": " ".join(filter(None, dict.fromkeys(_meaning(c.kind) for c in conditions))),
        "causes": [_cause(c) for c in conditions],
    }
    return found | ({"docs": entry["docs"]} if "docs" in entry else {})


def find(code: str) -> tuple[str, dict[str, Any]]:
    """A code, without the prefix, and its entry in the catalogue; only the condition, if one is named.

    Args:
        code: with or without its prefix, in any case, also in brackets.

    Raises:
        UsageError: there is no such code.
    """
    known = entries()
    wanted, _, name = code.strip().strip("[]").upper().removeprefix(PREFIX).partition(".")
    entry = known.get(wanted)
    if entry is not None and name in entry.get("conditions", {}):
        return wanted, {**entry, "conditions": {name: entry["conditions"][name]}}
    if entry is not None and not name:
        return wanted, entry
    names = [f"{wanted}.{n}" for n in entry["conditions"]] if entry and "conditions" in entry else list(known)
    near = get_close_matches(f"{wanted}.{name}" if entry else wanted, names, n=1)
    if near:
        raise UsageError("CODE_UNKNOWN.NEAR", name=code, near=PREFIX + near[0])
    raise UsageError("CODE_UNKNOWN.OTHER", name=code)


def explain(
    code: Annotated[str | None, typer.Argument(help="As printed, DELIVERED_LEDGER_AHEAD. Default: list all.")] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Explain an error code: what it means, what causes it, and what to run next."""
    found = [find(code)] if code is not None else list(entries().items())
    shown = [to_json(*each) for each in found]
    if output is Output.JSON:
        say_json(shown if code is None else shown[0])
        return
    for entry in shown:
        if code is None:
            say(entry["code"])
            continue
        first = entry["causes"][0]["meaning"]
        say(f"{entry['code']}: {first}".removesuffix(": "))
        for cause in entry["causes"]:
            other = f"{cause['meaning']} " if cause["meaning"] != first else ""
            say(f"\n  {other}{spoken(cause['cause'])}")
            if cause["next"]:
                say(f"  Next: {spoken(cause['next'])}")
        if "docs" in entry:
            say(f"\n  See docs/{entry['docs']}")
