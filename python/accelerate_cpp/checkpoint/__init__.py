"""Checkpoints: the content of their files, and how a folder of them is completed in one step."""
