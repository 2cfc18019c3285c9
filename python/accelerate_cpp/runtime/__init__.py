"""What exists while training runs: the session and its collaborators, and the one global that points at them."""
