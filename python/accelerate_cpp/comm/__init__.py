"""Process groups, and the operations that use them."""
