"""A query's checkpoint: Spark's own files, and this package's sidecar files in its folder `delivered`.

folder.py           location, state of the batch about to run, sidecar files
first_offsets.py    where batch 0 started
offset_metadata.py  offset metadata that Spark's log cannot hold
landmarks.py        what stands right before a source's position
dedup.py            the dedup that created the state
"""
