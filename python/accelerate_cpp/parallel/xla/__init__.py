"""Training through torch_xla: by one process for each device, or by one process for all of them (SPMD)."""
