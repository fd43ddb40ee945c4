"""A query's checkpoint: Spark's own files, and this package's sidecar files in its folder `delivered`.

folder.py   location and how it is opened, state of the batch about to run, sidecar files
sidecar.py  of its sources: where batch 0 started, metadata that Spark cannot log, what precedes a position; of its
            query: deciding sink, dedup, shards, removed sources, registered schemas; records that a batch's source
            could not turn into rows
history.py  what batches took and audits found; starts, ends and errors of drivers
"""
