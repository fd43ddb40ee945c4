"""A query's checkpoint as files: what Spark writes there, and what we keep beside it, in its folder `delivered`.

folder.py           where it lies, what it says of the batch about to run, our small files
first_offsets.py    where batch 0 began
offset_metadata.py  what a source knows of its offsets and Spark's log cannot hold
dedup.py            what the state of a dedup was made by
"""
