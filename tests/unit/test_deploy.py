"""deploy/: manifests fit Kubernetes' schemas, commands exist with their options, and a batch gets its time to end."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from configparser import ConfigParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import kubernetes_validate
import psutil
import pytest
import typer
import yaml
from tests.support.decided import checkpoint, decide, pipeline
from typer.testing import CliRunner

import delivered
from delivered.cli.main import app
from delivered.engine.owner import _at
from delivered.model.work import Owner

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCUMENTS = [d for d in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()) if d]
DEPLOYMENT = next(d for d in DOCUMENTS if d["kind"] == "Deployment")["spec"]
POD = DEPLOYMENT["template"]["spec"]
CONTAINERS = {c["name"]: c for c in POD["containers"]}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
UNIT = (DEPLOY / "delivered@.service").read_text()


def parsed(command: list[str]) -> dict[str, Any]:
    """Arguments and options of a command, as the command line reads them. Raises what it says of a wrong one."""
    assert Path(command[0]).name == "delivered", command
    found: Any = typer.main.get_command(app)
    context, rest = found.context_class(found), command[1:]
    while hasattr(found, "resolve_command"):
        _, found, rest = found.resolve_command(context, rest)
    return dict(found.make_context("delivered", list(rest)).params)


def ini(text: str) -> ConfigParser:
    made = ConfigParser(interpolation=None, strict=True, comment_prefixes=("#", ";"))
    made.optionxform = str  # type: ignore[assignment,method-assign]
    made.read_string(text)
    return made


SYSTEMD = ini(UNIT)["Service"]
SUPERVISORD = ini((DEPLOY / "supervisord.conf").read_text())["program:orders"]


COMMANDS = {
    "driver": ["delivered", *CONTAINERS["driver"]["args"]],
    "metrics": ["delivered", *CONTAINERS["metrics"]["args"]],
    "probe": CONTAINERS["driver"]["readinessProbe"]["exec"]["command"],
    "systemd": shlex.split(SYSTEMD["ExecStart"]),
    "supervisord": shlex.split(SUPERVISORD["command"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_exists_with_its_options(name: str) -> None:
    assert parsed(COMMANDS[name])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [("runs", "No such command"), ("run x.yaml --stop-time 1", "No such option"), ("run", "(?i)missing")],
)
def test_a_command_that_does_not_exist_is_noticed(wrong: str, said: str) -> None:
    with pytest.raises(Exception, match=said):
        parsed(["delivered", *wrong.split()])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d["kind"])
def test_manifests_fit_the_schemas_of_kubernetes(document: Any) -> None:
    kubernetes_validate.validate(document, "1.34", strict=True)
    document = json.loads(json.dumps(document))
    document["metadata"]["names"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, "1.34", strict=True)


def test_there_is_one_driver_at_a_time_and_it_may_end_its_batch() -> None:
    assert DEPLOYMENT["replicas"] == 1 and DEPLOYMENT["strategy"] == {"type": "Recreate"}
    assert POD["terminationGracePeriodSeconds"] > parsed(COMMANDS["driver"])["stop_timeout"]
    assert POD["shareProcessNamespace"], "or the metrics container does not see the driver's process"
    assert int(SYSTEMD["TimeoutStopSec"]) > parsed(COMMANDS["systemd"])["stop_timeout"]
    assert (SYSTEMD["KillMode"], SYSTEMD["Restart"], ini(UNIT)["Unit"]["StartLimitIntervalSec"]) == (
        "mixed",
        "always",
        "0",
    )
    assert int(SUPERVISORD["stopwaitsecs"]) > parsed(COMMANDS["supervisord"])["stop_timeout"]
    assert (SUPERVISORD["stopasgroup"], SUPERVISORD["killasgroup"], SUPERVISORD["autorestart"]) == (
        "false",
        "true",
        "true",
    )


def test_the_pods_pipeline_is_one_and_its_secrets_are_references(tmp_path: Path) -> None:
    ((name, text),) = next(d for d in DOCUMENTS if d["kind"] == "ConfigMap")["data"].items()
    (tmp_path / name).write_text(text)
    made = delivered.Pipeline.from_file(tmp_path / name)
    assert made.plan(offline=True).guarantee is delivered.Guarantee.EXACTLY_ONCE
    mounts = {m["name"]: m["mountPath"] for m in CONTAINERS["driver"]["volumeMounts"]}
    assert str(parsed(COMMANDS["driver"])["file"]) == f"{mounts['pipeline']}/{name}"
    assert made.checkpoint.startswith(mounts["state"])
    given = {e["name"] for e in CONTAINERS["driver"]["env"] if "secretKeyRef" in e["valueFrom"]}
    assert set(re.findall(r"env:(\w+)", text)) == given
    assert not re.search(r"(password|secret)\S*:\s+(?!env:|file:)\S", text)


def test_the_image_installs_what_there_is() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    assert set(arguments["EXTRAS"].split(",")) <= set(PROJECT["optional-dependencies"])
    assert arguments["VERSION"] == PROJECT["version"]
    for module in re.findall(r"python -m (\S+)", text):
        assert find_spec(module) is not None, module
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[0])
    assert entry[-1] in PROJECT["scripts"]
    assert int(re.findall(r"^USER (\d+)$", text, re.MULTILINE)[0]) == POD["securityContext"]["runAsUser"]


def check(folder: Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["status", "--check", str(folder / "orders.yaml")])
    return done.exit_code, done.stdout


def test_the_probe_asks_the_ledger(tmp_path: Path) -> None:
    text = f"""
    pipeline: orders
    guarantee: exactly_once
    checkpoint: {tmp_path}/checkpoint
    source: {{format: log, path: {tmp_path}/in}}
    sinks: [{{format: sqlite, path: {tmp_path}/out.db, table: orders}}]
    """
    (tmp_path / "orders.yaml").write_text(text)
    made = pipeline(tmp_path)
    assert check(tmp_path) == (1, "orders: no driver has claimed the ledger yet\n")
    decide(made, 1, _at(Owner("owner"), psutil.Process()))
    checkpoint(made, 1)
    assert check(tmp_path) == (0, "")
    Path(made.sinks[0].options["path"]).write_bytes(b"not a database, and not an empty file" * 40)
    code, said = check(tmp_path)
    assert code == 1 and "is not a valid SQLite database" in said
    server = "{format: postgres, url: postgresql://127.0.0.1:1/x, dbtable: orders}"
    (tmp_path / "orders.yaml").write_text(re.sub(r"\{format: sqlite.*\}", server, text))
    code, said = check(tmp_path)
    assert code == 3 and said.startswith("orders: "), "nobody knows"
