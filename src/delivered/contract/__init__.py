"""What a connector implements. The engine and the planner know nothing else of it."""
