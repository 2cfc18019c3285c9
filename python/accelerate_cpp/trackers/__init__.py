"""Experiment trackers: what a run logs goes to TensorBoard, MLflow, Weights & Biases and others. No library is needed
before a run asks for it."""
