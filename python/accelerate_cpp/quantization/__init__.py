"""Models in 8 or 4 bits."""
