"""A program that becomes another one, which finds its rank in the variables that torch reads.

Run by its path, as a worker of DeepSpeed's launcher where only MPI or Slurm says the ranks.
"""

from __future__ import annotations

import os
import sys

from accelerate_cpp.config import env_table
from accelerate_cpp.launch.plan.machines import find_launchers


def main(command: list[str]) -> None:
    """Becomes ``command``, a program with its arguments.

    Raises:
        InvalidArgument: variables of MPI or Slurm contradict each other.
    """
    found = find_launchers(os.environ)
    told = {
        env_table.RANK: found.rank,
        env_table.WORLD_SIZE: found.count,
        env_table.LOCAL_RANK: found.local_rank,
        env_table.LOCAL_WORLD_SIZE: found.local_count,
        env_table.MASTER_ADDR: found.address,
    }
    os.execve(command[0], command, {**os.environ, **env_table.render(told)})


if __name__ == "__main__":
    main(sys.argv[1:])
