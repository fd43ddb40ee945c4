"""The audit: what was sent, against what readers of the sink find. No Spark, no connector; the jobs are in `spark/`."""
