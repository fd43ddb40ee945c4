"""A query's checkpoint as files: Spark's own, and our sidecar files in its folder `delivered`.

folder.py           location, state of the batch about to run, our files
first_offsets.py    where batch 0 started
offset_metadata.py  metadata of offsets that Spark's log cannot hold
dedup.py            the dedup that created the state
"""
