"""Phase 5: compares what was sent with what readers of the sink find. Pure: no Spark, no connector."""
