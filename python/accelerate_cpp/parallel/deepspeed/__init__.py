"""Training by engines of DeepSpeed, which is imported only when a run asks for it."""
