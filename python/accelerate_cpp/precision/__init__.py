"""What forward and backward passes compute in, and the scale of the loss where that is fp16."""
