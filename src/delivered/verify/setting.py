"""What one case is given: its place, its records, source and sink, and what stands between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from delivered import brokers
from delivered.model.guarantee import Guarantee
from delivered.verify.proxy import Proxy
from delivered.verify.services import SERVICES, SPARK, Service
from delivered.verify.systems.base import SinkClient, SourceClient
from delivered.verify.template import Template
from delivered.verify.workloads import Workload


@dataclass
class Setting:
    """See the module.

    Attributes:
        checkpoint: its folder.
        extra: more keys of the pipeline file.
        proxy, broker: None without a server.
        source_broker: holds the source; None: no server does.
        plain_s: time to the first effect of a plain restart; None: not known.
        env: of the pipeline's processes.
        template: a pipeline of the user's to take in place of the verifier's own.
    """

    name: str
    folder: Path
    guarantee: Guarantee
    workload: Workload
    seed: int
    source: SourceClient
    sink: SinkClient
    checkpoint: Path
    extra: dict[str, Any] = field(default_factory=dict)
    proxy: Proxy[Any] | None = None
    broker: brokers.Broker | None = None
    source_broker: brokers.Broker | None = None
    plain_s: float | None = None
    env: dict[str, str] = field(default_factory=dict)
    service: Service = SERVICES[SPARK]
    template: Template | None = None
