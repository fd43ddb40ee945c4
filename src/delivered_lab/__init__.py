"""Serves pipelines and breaks them, in tests and in your own trials: real servers, a supervisor, the verifier."""
