"""Scripts that a launch can run."""
