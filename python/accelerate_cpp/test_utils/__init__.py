"""Scripts and helpers for trying out an installation."""
