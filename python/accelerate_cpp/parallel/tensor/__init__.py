"""Tensor parallelism: the processes of a group split the layers of a model."""
