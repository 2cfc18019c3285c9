"""Training of a model in stages, each on another rank, through which the parts of a batch pass."""
