"""Models larger than a device: device maps, hooks, offloaded weights, and loading checkpoints into them."""
