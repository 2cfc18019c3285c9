"""The display of a launch: the output of its workers, their progress, and the report at the end."""
