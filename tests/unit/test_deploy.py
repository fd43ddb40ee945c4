"""deploy/: manifests fit Kubernetes' schemas, commands exist with their options, and a batch gets its time to end."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
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
from delivered.engine.context import _place
from delivered.model.work import Owner

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCUMENTS = [d for d in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()) if d]
EXECUTORS = [d for d in yaml.safe_load_all((DEPLOY / "kubernetes-executors.yaml").read_text()) if d]
STATEFUL = next(d for d in DOCUMENTS if d["kind"] == "StatefulSet")
POD = STATEFUL["spec"]["template"]["spec"]
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


@pytest.mark.parametrize("document", [*DOCUMENTS, *EXECUTORS], ids=lambda d: d["kind"])
def test_manifests_fit_the_schemas_of_kubernetes(document: Any) -> None:
    kubernetes_validate.validate(document, "1.34", strict=True)
    document = json.loads(json.dumps(document))
    document["metadata"]["names"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, "1.34", strict=True)


def test_there_is_one_driver_at_a_time_and_it_may_end_its_batch() -> None:
    (claim,) = STATEFUL["spec"]["volumeClaimTemplates"]
    assert STATEFUL["spec"]["replicas"] == 1 and claim["spec"]["accessModes"] == ["ReadWriteOncePod"]
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


def test_executors_find_the_driver_and_may_be_made() -> None:
    config = next(d for d in EXECUTORS if d["kind"] == "ConfigMap")
    pipeline, template = (yaml.safe_load(config["data"][name]) for name in ("orders.yaml", "executor.yaml"))
    conf = pipeline["spark"]
    service = next(d for d in DOCUMENTS if d["kind"] == "Service")
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"].items() <= STATEFUL["spec"]["template"]["metadata"]["labels"].items()
    assert conf["spark.driver.host"] == service["metadata"]["name"] == STATEFUL["spec"]["serviceName"]
    assert conf["spark.driver.bindAddress"] == "0.0.0.0"
    ports = {p["name"]: p["port"] for p in service["spec"]["ports"]}
    assert ports == {"driver": conf["spark.driver.port"], "blocks": conf["spark.driver.blockManager.port"]}
    assert ports == {p["name"]: p["containerPort"] for p in CONTAINERS["driver"]["ports"]}
    assert conf["spark.kubernetes.driver.pod.name"] == f"{STATEFUL['metadata']['name']}-0"
    (rule,) = next(d for d in EXECUTORS if d["kind"] == "Role")["rules"]
    assert {"pods", "services", "configmaps", "persistentvolumeclaims"} == set(rule["resources"])
    assert {"create", "get", "list", "watch", "delete", "deletecollection"} <= set(rule["verbs"])
    binding = next(d for d in EXECUTORS if d["kind"] == "RoleBinding")
    account = next(d for d in DOCUMENTS if d["kind"] == "ServiceAccount")["metadata"]["name"]
    assert [s["name"] for s in binding["subjects"]] == [account] == [POD["serviceAccountName"]]
    assert not template["spec"]["automountServiceAccountToken"]
    assert template["spec"]["securityContext"] == POD["securityContext"]
    assert template["spec"]["containers"][0]["securityContext"] == CONTAINERS["driver"]["securityContext"]
    kubernetes_validate.validate({**template, "metadata": {"name": "x"}} | _with_image(template), "1.34", strict=True)
    image = conf["spark.kubernetes.container.image"]
    assert image == CONTAINERS["driver"]["image"]
    assert {"spark.executor.failuresValidityInterval", "spark.executor.maxNumFailures"} <= conf.keys()


def _with_image(template: dict[str, Any]) -> dict[str, Any]:
    spec = template["spec"]
    return {"spec": {**spec, "containers": [{**c, "image": "x"} for c in spec["containers"]]}}


def test_the_entry_point_starts_what_spark_asks_for(tmp_path: Path) -> None:
    """`executor` and `driver` as Spark's own image, everything else is a command of ours. No program really starts."""
    said = '#!/bin/sh\nfor one in "${0##*/}" "$@"; do echo "<$one>"; done\n'
    (tmp_path / "bin").mkdir()
    for name in ("java", "delivered", "bin/spark-submit"):
        (tmp_path / name).write_text(said)
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SPARK_HOME": str(tmp_path)}
    env |= {"SPARK_EXECUTOR_MEMORY": "1g", "SPARK_JAVA_OPT_0": "-Da=b c", "SPARK_JAVA_OPT_1": "-Dd='e'"}
    env |= {f"SPARK_{name}": name.lower() for name in ("DRIVER_URL", "EXECUTOR_ID", "APPLICATION_ID")}
    env |= {f"SPARK_{name}": name.lower() for name in ("EXECUTOR_POD_IP", "RESOURCE_PROFILE_ID", "EXECUTOR_POD_NAME")}
    env |= {"SPARK_EXECUTOR_CORES": "2", "SPARK_DRIVER_BIND_ADDRESS": "10.0.0.1"}

    def run(*arguments: str) -> list[str]:
        done = subprocess.run([DEPLOY / "entrypoint.sh", *arguments], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [line[1:-1] for line in done.stdout.splitlines()]

    command = run("executor")
    assert command[:5] == ["java", "-Da=b c", "-Dd='e'", "-Xms1g", "-Xmx1g"]
    backend = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
    given = dict(zip(command[command.index(backend) + 1 :: 2], command[command.index(backend) + 2 :: 2], strict=True))
    assert given == {
        "--driver-url": "driver_url", "--executor-id": "executor_id", "--cores": "2", "--app-id": "application_id",
        "--hostname": "executor_pod_ip", "--resourceProfileId": "resource_profile_id", "--podName": "executor_pod_name",
    }  # fmt: skip
    assert run("driver", "--class", "x")[:3] == ["spark-submit", "--conf", "spark.driver.bindAddress=10.0.0.1"]
    assert run("run", "a b.yaml") == ["delivered", "run", "a b.yaml"] and run() == ["delivered"]


def test_the_image_installs_what_there_is() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    assert set(arguments["EXTRAS"].split(",")) <= set(PROJECT["optional-dependencies"])
    assert arguments["VERSION"] == PROJECT["version"]
    for module in re.findall(r"python -m (\S+)", text):
        assert find_spec(module) is not None, module
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    copied = re.findall(r"^COPY --chmod=755 (\S+) (\S+)$", text, re.MULTILINE)
    assert [(DEPLOY / name).is_file() and place for name, place in copied] == [json.loads(entry)[-1]]
    kinds = arguments["JARS"].split()
    assert set(kinds) == {"s3a"} and find_spec("delivered_lab.jars")
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
    decide(made, 1, _place(Owner("owner"), psutil.Process()))
    checkpoint(made, 1)
    assert check(tmp_path) == (0, "")
    Path(made.sinks[0].options["path"]).write_bytes(b"not a database, and not an empty file" * 40)
    code, said = check(tmp_path)
    assert code == 1 and "is not a valid SQLite database" in said
    server = "{format: postgres, url: postgresql://127.0.0.1:1/x, dbtable: orders}"
    (tmp_path / "orders.yaml").write_text(re.sub(r"\{format: sqlite.*\}", server, text))
    code, said = check(tmp_path)
    assert code == 3 and said.startswith("orders: "), "nobody knows"
