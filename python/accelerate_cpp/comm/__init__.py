"""Process groups and what travels over them."""
