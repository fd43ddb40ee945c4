"""Quix Streams from topic to topic. Arguments: pipeline file, seconds that a record takes."""

import sys
import time
from pathlib import Path

import yaml
from quixstreams import Application

IDLE_S = 6.0
told = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
source, sink = told["source"], told["sinks"][0]
app = Application(
    broker_address=source["kafka.bootstrap.servers"],
    consumer_group=told["pipeline"],
    auto_offset_reset="earliest",
    processing_guarantee=told["guarantee"].replace("_", "-"),
    commit_interval=0.5,
    # Else a restarted application waits 45 s for its killed self to leave the group.
    consumer_extra_config={"session.timeout.ms": 6_000, "heartbeat.interval.ms": 1_000},
    state_dir=told["checkpoint"],
    loglevel="WARNING",
)
topic_in = app.topic(source["subscribe"], key_deserializer="bytes", value_deserializer="bytes")
topic_out = app.topic(sink["topic"], key_serializer="bytes", value_serializer="bytes")


def slowly(value: bytes) -> bytes:
    time.sleep(float(sys.argv[2]))
    return value


app.run(app.dataframe(topic_in).apply(slowly).to_topic(topic_out), timeout=IDLE_S)
