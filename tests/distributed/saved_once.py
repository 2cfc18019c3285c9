"""Saves twice, in a layout and a folder that the command line names: what ``test_durable_checkpoints.py`` traces."""

from __future__ import annotations

import sys

from killed_saves import Training


def main(layout: str, folder: str, blocking: bool) -> None:
    training = Training(layout, folder, limit=1)
    for _ in range(2):
        training.step()
        training.run.save_state(blocking=blocking)
        training.run.wait_for_checkpoint()
    training.run.end_training()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] == "blocking")
