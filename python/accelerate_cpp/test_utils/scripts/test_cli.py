"""Whether a launch reaches its processes: each says which one it is, and where it computes."""

from __future__ import annotations

from accelerate_cpp import PartialState


def main() -> None:
    """Prints one line."""
    state = PartialState()
    print(f"process {state.process_index} of {state.num_processes} runs on {state.device}")


if __name__ == "__main__":
    main()
