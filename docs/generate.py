"""`make docs`: reference pages generated from the code. `--check` fails if a page is not up to date."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from docs import (
    behaviours,
    benchmark,
    checkpoint,
    cli,
    diagrams,
    facts,
    figures,
    logins,
    measured,
    metrics,
    new_connector,
    notebook,
    pipeline_file,
    pitfalls,
    python_reference,
    recompute,
    spark_versions,
    support,
    value_types,
    verified,
)
from docs.errors import escaped

from delivered.model.options import OptionTable
from delivered.pipeline.file import as_text
from delivered.pipeline.registry import connectors
from delivered.pipeline.spec import PIPELINE_OPTIONS

DOCS = Path(__file__).parent


def _in_table(text: str) -> str:
    return escaped(text).replace("|", "\\|")


def options_table(table: OptionTable) -> list[str]:
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for option in sorted(table.options, key=lambda o: not o.required):
        default = "required" if option.required else (option.default or "")
        secret = " Secret: write `env:NAME` or `file:PATH`." if option.secret else ""
        lines.append(f"| `{option.name}` | {_in_table(default)} | {_in_table(option.doc)}{secret} |")
    lines += [f"| `{prefix}*` | | Passed to the client library. |" for prefix in table.passthrough]
    return lines


def reference() -> str:
    """Every option of every format."""
    lines = [
        "# Options",
        "",
        "This page lists every option of every source and sink; look here for an option's name, default and meaning.",
        "An unknown option is refused, with the nearest name.",
        "",
    ]
    lines += ["## All sinks, in `writeStream` and `df.write`", "", *options_table(PIPELINE_OPTIONS), ""]
    for name, connector in connectors().items():
        for kind, table in (("source", connector.source_options), ("sink", connector.sink_options)):
            if table is not None:
                lines += [f"## `delivered_{name}` as a {kind}", "", *options_table(table), ""]
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    audit, parity, new = DOCS / "audit.md", DOCS / "connectors" / "kafka-parity.md", DOCS / "new-connector.md"
    file, limits = DOCS / "pipeline-file.md", DOCS / "limits.md"
    versions, readme = DOCS / "spark-versions.md", DOCS.parent / "README.md"
    deploy, stateful = DOCS / "deploy.md", DOCS / "stateful.md"
    operate, kafka_logins = DOCS / "operate.md", DOCS / "connectors" / "kafka-logins.md"
    return {
        **diagrams.pages(),
        **facts.pages(),
        readme: support.into(readme.read_text(encoding="utf-8")),
        audit: recompute.into(audit.read_text(encoding="utf-8")),
        DOCS / "benchmark.md": benchmark.page(),
        DOCS / "checkpoint.md": checkpoint.page(),
        kafka_logins: logins.into(kafka_logins.read_text(encoding="utf-8")),
        parity: behaviours.into(parity.read_text(encoding="utf-8")),
        new: new_connector.into(new.read_text(encoding="utf-8")),
        limits: figures.into(limits.read_text(encoding="utf-8")),
        operate: measured.into(metrics.into(operate.read_text(encoding="utf-8"))),
        deploy: measured.into(deploy.read_text(encoding="utf-8")),
        stateful: measured.into(stateful.read_text(encoding="utf-8")),
        DOCS / "cli.md": cli.page(),
        DOCS / "options.md": reference(),
        DOCS / "pipeline.schema.json": as_text(),
        file: pipeline_file.into(file.read_text(encoding="utf-8")),
        DOCS / "pitfalls.md": pitfalls.page(),
        DOCS / "python.md": python_reference.page(),
        versions: spark_versions.into(versions.read_text(encoding="utf-8")),
        DOCS / "support.md": support.page(),
        DOCS / "types.md": value_types.page(),
        DOCS / "tutorial.ipynb": notebook.notebook(notebook.PAGE.read_text(encoding="utf-8")),
        DOCS / "verified.md": verified.page(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = {p: text for p, text in pages().items() if not p.exists() or p.read_text(encoding="utf-8") != text}
    if check:
        for page in stale:
            sys.stderr.write(f"{page.name} is not up to date; run `make docs`\n")
        return 1 if stale else 0
    for page, text in stale.items():
        page.write_text(text, encoding="utf-8")
    from docs import benchmark_plot, demo  # the chart library is loaded for their pictures alone

    demo.draw(demo.stored())
    benchmark_plot.draw()
    for picture in ("demo.svg", "benchmark.svg"):
        diagrams.follow_dark(DOCS / picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
