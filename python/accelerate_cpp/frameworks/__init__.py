"""What JAX and TensorFlow share here: processes, collectives, averages, batches and checkpoints on host memory."""
