"""Starting and watching the workers of a run on this host, and ending all when one fails. Does not load torch."""
