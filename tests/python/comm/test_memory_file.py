from __future__ import annotations

import os
import stat

from accelerate_cpp.comm.memory_file import memory_file


def test_a_memory_file_has_no_name_and_is_for_its_owner() -> None:
    descriptor = memory_file("accelerate-cpp-test")
    try:
        status = os.fstat(descriptor)
        assert (status.st_size, status.st_nlink, stat.S_IMODE(status.st_mode)) == (0, 0, 0o600)
        assert os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:accelerate-cpp-test")
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)
