"""Nouns of the product. Frozen, picklable, no I/O; imports nothing of ours."""
