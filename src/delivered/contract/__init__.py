"""What a connector implements: all that engine and planner know of it."""
