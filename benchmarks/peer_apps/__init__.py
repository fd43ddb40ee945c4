"""What a user would take instead of `delivered`: each copies one topic into another, as the verifier's pipeline file
says, until everything is through that was there at the start. Each runs as a script, in an environment of its own."""
