"""Phase 3, on executors: a task's rows become a prepared shard."""
