"""Trains a small network on scikit-learn's 1,797 handwritten digits with JAX, on any number of processes."""

import argparse
import json

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

from accelerate_cpp import jax as processes


def load_data():
    """Training and test set: images of shape (64,) in 0…1, fp32, with their labels 0…9."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = (digits.data[order] / 16).astype(np.float32), digits.target[order].astype(np.int32)
    return (images[:1437], labels[:1437]), (images[1437:], labels[1437:])


def batches_of(arrays, batch_size, epoch):
    """Full batches in the order of an epoch."""
    order = np.random.default_rng(epoch).permutation(len(arrays[1]))
    for start in range(0, len(order) - batch_size + 1, batch_size):
        rows = order[start : start + batch_size][processes.rank() :: processes.world_size()]
        yield [jnp.asarray(array[rows]) for array in arrays]


def new_parameters(seed, sizes=(64, 128, 10)):
    """Weights and biases of a network with one hidden layer."""
    keys = jax.random.split(jax.random.key(seed), len(sizes) - 1)
    return [
        {"w": jax.random.normal(key, (rows, columns)) / np.sqrt(rows), "b": jnp.zeros(columns)}
        for key, rows, columns in zip(keys, sizes, sizes[1:], strict=False)
    ]


def logits_of(parameters, images):
    hidden = jax.nn.relu(images @ parameters[0]["w"] + parameters[0]["b"])
    return hidden @ parameters[1]["w"] + parameters[1]["b"]


def loss_of(parameters, images, labels):
    log_probabilities = jax.nn.log_softmax(logits_of(parameters, images))
    return -jnp.take_along_axis(log_probabilities, labels[:, None], axis=1).mean()


@jax.jit
def step(parameters, momentum, images, labels):
    gradients = processes.average_gradients(jax.grad(loss_of)(parameters, images, labels))
    momentum = jax.tree.map(lambda velocity, gradient: 0.9 * velocity + gradient, momentum, gradients)
    return jax.tree.map(lambda weight, velocity: weight - 0.1 * velocity, parameters, momentum), momentum


def report(history, metrics):
    """Prints the loss and the accuracy of each epoch, and writes them into a file if there is one."""
    for epoch, row in enumerate(history, 1):
        print(f"epoch {epoch}: loss {row['loss']:.4f}, accuracy {row['accuracy']:.3f}")
    if metrics:
        with open(metrics, "w") as file:
            json.dump(history, file)


def train(args):
    (images, labels), (test_images, test_labels) = load_data()
    parameters = new_parameters(args.seed)
    momentum = jax.tree.map(jnp.zeros_like, parameters)
    history = []
    for epoch in range(args.epochs):
        for batch in batches_of((images, labels), args.batch_size, epoch):
            parameters, momentum = step(parameters, momentum, *batch)
        found = logits_of(parameters, test_images).argmax(axis=1)
        accuracy = float((found == test_labels).mean())
        history.append({"loss": float(loss_of(parameters, test_images, test_labels)), "accuracy": accuracy})
    if processes.is_main_process():
        report(history, args.metrics)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=64, help="samples of a step, on all processes together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--metrics", help="a file for loss and accuracy of each epoch, as JSON")
    train(parser.parse_args())
