"""Where a process computes, and how batches get there. The work is done in C++."""
