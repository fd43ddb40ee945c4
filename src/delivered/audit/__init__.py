"""Phase 5: what was sent against what a reader of the sink finds. Pure: no Spark, no connector."""
