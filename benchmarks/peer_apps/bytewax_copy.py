"""Bytewax from topic to topic, with recovery. Arguments: pipeline file, seconds that a record takes."""

import sys
import time
from datetime import timedelta
from pathlib import Path

import bytewax.operators as op
import yaml
from bytewax.connectors.kafka import KafkaSink, KafkaSinkMessage, KafkaSource
from bytewax.dataflow import Dataflow
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.run import cli_main

told = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
source, sink = told["source"], told["sinks"][0]
store = Path(told["checkpoint"])
if not store.exists():
    store.mkdir(parents=True)
    init_db_dir(store, 1)


def copied(message):
    time.sleep(float(sys.argv[2]))
    return KafkaSinkMessage(message.key, message.value)


flow = Dataflow("copy")
brokers = [source["kafka.bootstrap.servers"]]
read = op.input("in", flow, KafkaSource(brokers, [source["subscribe"]], tail=False, batch_size=20))
op.output("out", op.map("copy", read, copied), KafkaSink([sink["kafka.bootstrap.servers"]], sink["topic"]))
cli_main(flow, epoch_interval=timedelta(seconds=0.5), recovery_config=RecoveryConfig(store))
