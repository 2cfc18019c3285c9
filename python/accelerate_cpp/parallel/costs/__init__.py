"""What an optimizer step on a mesh communicates and waits for, computed without processes."""
