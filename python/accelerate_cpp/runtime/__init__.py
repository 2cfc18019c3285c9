"""The objects that exist while training runs: the session, its collaborators, and the global that refers to them."""
