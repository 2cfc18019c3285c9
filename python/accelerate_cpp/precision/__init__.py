"""The precision of forward and backward passes, and the scale of the loss in fp16."""
