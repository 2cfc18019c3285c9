"""A program that becomes another one, and is killed when the process that started it dies.

Run by its path, as a worker of torch's elastic agent, which ties nothing to itself.
"""

from __future__ import annotations

import os
import sys

from accelerate_cpp.launch.workers.child import tie_to_parent


def main(command: list[str]) -> None:
    """Becomes ``command``, a program with its arguments."""
    tie_to_parent(os.getppid())
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
