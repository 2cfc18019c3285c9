"""Trains a small network on scikit-learn's 1,797 handwritten digits with Keras 3 alone, on one process."""

import argparse
import json

import keras
import numpy as np
from sklearn.datasets import load_digits


def load_data():
    """Training and test set: images of shape (8, 8, 1) in 0…1, fp32, with their labels 0…9."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = (digits.images[order] / 16).astype(np.float32)[..., None], digits.target[order].astype(np.int32)
    return (images[:1437], labels[:1437]), (images[1437:], labels[1437:])


def build_model():
    """A small convolutional network."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def report(history, metrics):
    """Prints the loss and the accuracy of each epoch, and writes them into a file if there is one."""
    for epoch, row in enumerate(history, 1):
        print(f"epoch {epoch}: loss {row['loss']:.4f}, accuracy {row['accuracy']:.3f}")
    if metrics:
        with open(metrics, "w") as file:
            json.dump(history, file)


def train(args):
    keras.utils.set_random_seed(args.seed)
    (images, labels), test_data = load_data()
    model = build_model()
    optimizer = keras.optimizers.Adam(3e-3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    full = len(labels) // args.batch_size * args.batch_size
    data = {"x": images[:full], "y": labels[:full], "batch_size": args.batch_size}
    callbacks = []
    history = []
    for _ in range(args.epochs):
        model.fit(**data, shuffle=False, verbose=0, callbacks=callbacks)
        history.append(dict(zip(("loss", "accuracy"), model.evaluate(*test_data, verbose=0), strict=True)))
    report(history, args.metrics)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--metrics", help="a file for loss and accuracy of each epoch, as JSON")
    train(parser.parse_args())
