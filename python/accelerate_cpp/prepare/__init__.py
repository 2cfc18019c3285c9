"""What ``prepare`` does, in its order, and what belongs to what was prepared."""
