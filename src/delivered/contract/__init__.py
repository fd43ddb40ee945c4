"""What a connector implements. The engine and the planner know nothing else of it.

source.py     offsets, slices, the driver and the tasks of a source
sink.py       writer, committer, ledger; several sinks of one batch
queue.py      receivers of a queue that forgets what is acknowledged, and the journal behind them
powers.py     opt-in, found by type: what a sink or a source can do besides
connector.py  where the entry point leads
finding.py    what a preflight check says
"""
