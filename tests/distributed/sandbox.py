"""Makes the calling process live in a sandbox: without certain system calls, or with small file systems of its own.

Nothing outside the process notices, and all of it ends with the process. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_NUMBERS = {
    "x86_64": {"memfd_create": 319, "pidfd_open": 434},
    "aarch64": {"memfd_create": 279, "pidfd_open": 434},
}
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_SECCOMP_MODE_FILTER = 2
_CLONE_FS, _CLONE_NEWNS = 0x200, 0x20000
_MS_RDONLY, _MS_REMOUNT, _MS_REC, _MS_PRIVATE = 0x1, 0x20, 0x4000, 0x40000
_MNT_DETACH = 2


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def refuse_memfd_and_pidfd(error: int) -> None:
    """From now on memfd_create and pidfd_open fail with ``error``, as where a container's filter refuses them."""
    load_number, if_equal, give_back = 0x20, 0x15, 0x06  # of the language of socket filters
    errno, allow = 0x50000 | error, 0x7FFF0000
    instructions = [(load_number, 0, 0, 0)]
    for number in _NUMBERS[platform.machine()].values():
        instructions += [(if_equal, 0, 1, number), (give_back, 0, 0, errno)]
    instructions.append((give_back, 0, 0, allow))
    program = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
    buffer = ctypes.create_string_buffer(program, len(program))
    description = struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(buffer))
    zero = ctypes.c_ulong(0)
    _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero), "giving up new privileges")
    _check(_LIBC.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), description), "installing a filter")


def _enter_own_mounts() -> None:
    _check(_LIBC.unshare(_CLONE_NEWNS), "unsharing mounts")
    _check(_LIBC.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None), "making mounts private")


def may_have_own_mounts() -> bool:
    """Whether processes of this user may have a table of mounts of their own."""
    child = os.fork()
    if child == 0:
        try:
            _enter_own_mounts()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _mount_tmpfs(folder: str, size_bytes: int) -> None:
    options = f"size={size_bytes}".encode()
    _check(_LIBC.mount(b"test", folder.encode(), b"tmpfs", ctypes.c_ulong(0), options), f"mounting on {folder}")


def mount_small_disk(folder: str, size_bytes: int, files: int) -> None:
    """This process gets a file system of its own at ``folder``, which has room for so many bytes, files and folders."""
    _enter_own_mounts()
    options = f"size={size_bytes},nr_inodes={files}".encode()
    _check(_LIBC.mount(b"test", folder.encode(), b"tmpfs", ctypes.c_ulong(0), options), f"mounting on {folder}")


def share_mounts_of(process: int) -> None:
    """This thread, and those that it starts, see the same mounts as ``process`` from now on."""
    _check(_LIBC.unshare(_CLONE_FS), "unsharing the working directory")
    descriptor = os.open(f"/proc/{process}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_LIBC.setns(descriptor, _CLONE_NEWNS), f"joining the mounts of process {process}")
    finally:
        os.close(descriptor)


def forbid_writing(folder: str, forbidden: bool = True) -> None:
    """Makes the file system at ``folder``, of :func:`mount_small_disk`, one that can only be read, or ends that."""
    flags = ctypes.c_ulong(_MS_REMOUNT | (_MS_RDONLY if forbidden else 0))
    _check(_LIBC.mount(None, folder.encode(), None, flags, None), f"remounting {folder}")


def take_away(folder: str) -> None:
    """The file system at ``folder`` vanishes; files that are open stay usable."""
    _check(_LIBC.umount2(folder.encode(), _MNT_DETACH), f"unmounting {folder}")


def shrink_shared_memory(size_bytes: int) -> None:
    """This process gets a /dev/shm of its own that holds no more than that."""
    _enter_own_mounts()
    _mount_tmpfs("/dev/shm", size_bytes)


def limit_control_group(left_bytes: int) -> None:
    """Lets this process see a control group, of either version, that leaves so much memory."""
    _enter_own_mounts()
    _mount_tmpfs("/sys/fs/cgroup", 1 << 20)
    root = Path("/sys/fs/cgroup")
    (root / "memory").mkdir()
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        (root / limit).write_text(f"{left_bytes + 1000}\n")
        (root / usage).write_text("1000\n")
