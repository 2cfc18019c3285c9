"""What a launch shows: the output of its workers, how far they are, and the report at the end."""
