"""The domain's nouns. Frozen, picklable, no I/O; imports no other package of the product."""
