"""Trains a small network on scikit-learn's 1,797 handwritten digits with TensorFlow, on any number of processes."""

import argparse
import json

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from accelerate_cpp import tensorflow as processes


def load_data():
    """Training and test set: images of shape (64,) in 0…1, fp32, with their labels 0…9."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = (digits.data[order] / 16).astype(np.float32), digits.target[order].astype(np.int32)
    return (images[:1437], labels[:1437]), (images[1437:], labels[1437:])


def batches_of(arrays, args):
    """Full batches, in another order in each epoch."""
    dataset = tf.data.Dataset.from_tensor_slices(arrays).shuffle(len(arrays[1]), seed=args.seed)
    return processes.shard_dataset(dataset, args.batch_size // processes.world_size(), drop_remainder=True)


def new_variables(seed):
    """Weights and biases of a network with one hidden layer."""
    variables = []
    for layer, (rows, columns) in enumerate([(64, 128), (128, 10)]):
        variables.append(tf.Variable(tf.random.stateless_normal((rows, columns), (seed, layer)) / rows**0.5))
        variables.append(tf.Variable(tf.zeros(columns)))
    return variables


def loss_of(variables, images, labels):
    """The loss of a batch, and the logits."""
    hidden = tf.nn.relu(images @ variables[0] + variables[1])
    logits = hidden @ variables[2] + variables[3]
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)), logits


@tf.function
def step(variables, momenta, images, labels):
    with tf.GradientTape() as tape:
        loss, _ = loss_of(variables, images, labels)
    gradients = processes.DistributedGradientTape(tape).gradient(loss, variables)
    for variable, momentum, gradient in zip(variables, momenta, gradients, strict=True):
        momentum.assign(0.9 * momentum + gradient)
        variable.assign_sub(0.1 * momentum)


def report(history, metrics):
    """Prints the loss and the accuracy of each epoch, and writes them into a file if there is one."""
    for epoch, row in enumerate(history, 1):
        print(f"epoch {epoch}: loss {row['loss']:.4f}, accuracy {row['accuracy']:.3f}")
    if metrics:
        with open(metrics, "w") as file:
            json.dump(history, file)


def train(args):
    training_data, (test_images, test_labels) = load_data()
    variables = new_variables(args.seed)
    momenta = [tf.Variable(tf.zeros_like(variable)) for variable in variables]
    batches = batches_of(training_data, args)
    history = []
    for _ in range(args.epochs):
        for images, labels in batches:
            step(variables, momenta, images, labels)
        loss, logits = loss_of(variables, test_images, test_labels)
        accuracy = float((tf.argmax(logits, 1).numpy() == test_labels).mean())
        history.append({"loss": float(loss), "accuracy": accuracy})
    if processes.is_main_process():
        report(history, args.metrics)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=64, help="samples of a step, on all processes together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--metrics", help="a file for loss and accuracy of each epoch, as JSON")
    train(parser.parse_args())
