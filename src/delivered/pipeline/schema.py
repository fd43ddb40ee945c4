"""The JSON Schema of a pipeline file, from the model and the connectors' option tables.

`python -m delivered.pipeline.schema docs/pipeline.schema.json` writes it; a test keeps the file up to date.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from delivered.model.options import Option, OptionTable
from delivered.pipeline.endpoint import SPARK_OWN
from delivered.pipeline.entries import PipelineFile
from delivered.pipeline.registry import connectors

_OPTION = {"type": ["string", "number", "boolean", "object"]}


def schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12."""
    document = PipelineFile.model_json_schema()
    installed = connectors()
    sources = {n: c.source_options for n, c in installed.items() if c.source_options is not None}
    sinks = {n: c.sink_options for n, c in installed.items() if c.sink_options is not None}
    definitions = document["$defs"]
    definitions["SourceEntry"] = _endpoint(definitions["SourceEntry"], sources, own=True)
    definitions["SinkEntry"] = _endpoint(definitions["SinkEntry"], sinks, own=False)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document}


def _endpoint(model: dict[str, Any], tables: dict[str, OptionTable], *, own: bool) -> dict[str, Any]:
    """One shape per connector: exactly its options."""
    common = {k: v for k, v in model["properties"].items() if k != "format"}
    shapes: list[dict[str, Any]] = [
        {
            "type": "object",
            "title": name,
            "properties": {
                "format": {"enum": [name, f"delivered_{name}"]},
                **common,
                **{spelling: _option(o) for o in table.options for spelling in (o.name, *o.aliases)},
            },
            "patternProperties": {f"^{re.escape(p)}": _OPTION for p in table.passthrough},
            "required": ["format", *(o.name for o in table.options if o.required)],
            "additionalProperties": False,
        }
        for name, table in tables.items()
    ]
    if own:
        pattern = {"format": {"type": "string", "pattern": f"^{SPARK_OWN}"}}
        shapes.append(
            {
                "type": "object",
                "title": "one of Spark's own sources",
                "properties": {**pattern, **common},
                "required": ["format"],
                "additionalProperties": _OPTION,
            }
        )
    return {"description": model["description"], "oneOf": shapes}


def _option(option: Option) -> dict[str, Any]:
    """Values may be text in any case, so allowed ones are listed as examples; bounds only apply to numbers."""
    examples = {} if option.example is None else {"examples": [option.example]}
    return {**_OPTION, "description": option.doc, **examples, **option.type.schema}


def as_text() -> str:
    return json.dumps(schema(), indent=2, sort_keys=True) + "\n"


def main() -> None:
    """Write the schema to the file given on the command line, or to standard output."""
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(as_text(), encoding="utf-8")
    else:
        sys.stdout.write(as_text())


if __name__ == "__main__":
    main()
