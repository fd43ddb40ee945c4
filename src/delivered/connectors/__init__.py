"""One folder per system. A connector imports `model`, `contract` and its own client library, nothing else."""
