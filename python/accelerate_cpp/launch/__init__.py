"""Starting the workers of a run on this host, watching them, and ending all of them when one fails. Loads no torch."""
