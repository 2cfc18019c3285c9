"""Checkpoints: which files hold what, and how a folder of them becomes whole in one step."""
