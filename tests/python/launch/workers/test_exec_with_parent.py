from __future__ import annotations

import os
import signal
import subprocess
import sys

from accelerate_cpp.launch.workers import exec_with_parent as tied


def test_program_takes_the_place_of_the_tied_one() -> None:
    code = "import os, sys; print(os.getpid(), sys.argv[1:])"
    with subprocess.Popen(
        [sys.executable, tied.__file__, sys.executable, "-c", code, "--flag"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.communicate()[0] == f"{process.pid} ['--flag']\n"


def test_program_is_killed_when_its_parent_dies() -> None:
    read_end, write_end = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.close(read_end)
        # The program holds the write end for as long as it lives.
        tied_command = [sys.executable, tied.__file__, "/bin/sh", "-c", "echo ready; exec sleep 600"]
        subprocess.Popen(tied_command, stdout=write_end)
        os.close(write_end)
        signal.pause()
    os.close(write_end)
    with open(read_end) as output:
        assert output.readline() == "ready\n"
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        assert output.read() == ""
