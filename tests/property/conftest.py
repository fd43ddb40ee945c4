"""No deadlines for examples: the machine may be busy."""

from hypothesis import settings

settings.register_profile("delivered", deadline=None, max_examples=50)
settings.load_profile("delivered")
