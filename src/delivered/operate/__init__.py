"""What operators look at: a pipeline's status from its ledger, its sinks and its source; metrics made of it."""
