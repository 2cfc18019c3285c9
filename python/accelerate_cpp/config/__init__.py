"""Everything that decides how a run is set up: the environment table, the frozen configuration, and its compilation."""
