"""A dry run of a script that reports what would go wrong in a long one: ``accelerate-cpp check``."""
