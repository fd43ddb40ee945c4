"""Fewer examples: they are whole histories. Without deadlines, as everywhere."""

from hypothesis import settings

settings.register_profile("delivered", deadline=None, max_examples=50)
settings.load_profile("delivered")
