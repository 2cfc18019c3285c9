"""The plan of a launch, resolved from its flags, files, variables, host and machines. Does not load torch."""
