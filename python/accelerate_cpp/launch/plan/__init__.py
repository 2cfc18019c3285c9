"""The plan of a launch: what its flags, files, variables, host and machines come to. Loads no torch."""
