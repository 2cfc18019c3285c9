"""Models whose parameters, gradients and optimizer states are shared out over the processes."""
