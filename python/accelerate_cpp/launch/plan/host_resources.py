"""The resources of this host for a launch: cores, GPUs, a free port, and the system calls that several workers need."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from accelerate_cpp.errors import InvalidArgument

_PORTS = range(20_000, 30_000)  # between those of most services and those that Kubernetes forwards
_TRIED_PORTS = 20


def _quota_of(folder: Path) -> float | None:
    """The CPU quota of one control group, of version 2 or 1, in cores; ``None`` without one."""
    limit = folder / "cpu.max"
    files = [limit] if limit.is_file() else [folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"]
    if not all(file.is_file() for file in files):
        return None
    quota, period = " ".join(file.read_text() for file in files).split()
    return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)


def _quota_in_cores(cgroup_root: Path, own_cgroup: Path) -> float | None:
    """The smallest quota on the way from this process's control groups to the roots of their hierarchies.

    ``core/base/cores`` does the same for waits in C++; the launcher loads no C++.
    """
    quotas = []
    # Lines are "number:controllers:/path"; version 2 has no controllers.
    for line in own_cgroup.read_text().splitlines() if own_cgroup.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroup_root / "cpu" if controllers else cgroup_root
        folder = root / path.lstrip("/")
        for level in (folder, *folder.parents):
            quotas.append(_quota_of(level))
            if level == root:
                break
    return min((quota for quota in quotas if quota is not None), default=None)


def usable_cores(cgroup_root: Path = Path("/sys/fs/cgroup"), own_cgroup: Path = Path("/proc/self/cgroup")) -> int:
    """Cores that this process may run on: its affinity, bounded by the CPU quota of its control groups; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota_in_cores(cgroup_root, own_cgroup)
    return cores if quota is None else max(1, min(cores, int(quota)))


def gpu_count(environ: Mapping[str, str] | None = None, devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that workers will see, counted without loading a driver library.

    Device nodes are counted; ``CUDA_VISIBLE_DEVICES`` narrows them as in CUDA: entries after a negative one are hidden.
    """
    environ = os.environ if environ is None else environ
    present = sum(1 for node in devices.glob("nvidia[0-9]*") if node.name.removeprefix("nvidia").isdigit())
    if "CUDA_VISIBLE_DEVICES" not in environ:
        return present
    visible = 0
    for entry in environ["CUDA_VISIBLE_DEVICES"].split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        visible += 1
    return min(present, visible)


def free_port(range_of_kernel: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> int:
    """A TCP port that nothing on this host listens on at the moment.

    Workers bind it only seconds later, so where the ports that the kernel gives to outgoing connections begin above
    20000, it is one below them.

    Args:
        range_of_kernel: a file with the first and the last of the kernel's.
    """
    end = int(range_of_kernel.read_text().split()[0]) if range_of_kernel.exists() else _PORTS.stop
    candidates = range(_PORTS.start, min(end, _PORTS.stop))
    for _ in range(_TRIED_PORTS if candidates else 0):
        with suppress(OSError):  # another program listens there
            return _bound(candidates[int.from_bytes(os.urandom(4), "big") % len(candidates)])
    return _bound(0)


def _bound(port: int) -> int:
    """``port``, or one that the kernel chooses for 0, after a test that it can be bound."""
    with socket.socket() as probe:
        probe.bind(("", port))
        return int(probe.getsockname()[1])


def require_port(port: int) -> None:
    """Raises :class:`InvalidArgument` if another program on this host listens on ``port``, which rank 0 has to use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store, which closed connections spare
        try:
            probe.bind(("", port))
        except OSError as error:
            raise InvalidArgument(
                f"rank 0 of the run cannot listen on port {port} of this machine ({error.strerror}): pass another "
                "--main_process_port on all machines, or end the program that uses it"
            ) from None


def can_supervise() -> bool:
    """Whether this system has the calls by which several workers are started and watched (Linux 5.4 or newer)."""
    if not (hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # the kernel is too old, or a sandbox refuses the call
        return False
    return True


def require_supervision(num_processes: int) -> None:
    """Raises :class:`InvalidArgument` if several workers cannot be started."""
    if not can_supervise():
        raise InvalidArgument(
            f"num_processes={num_processes} needs Linux 5.4 or newer with memfd_create and pidfd_open, "
            "which this system does not offer; use num_processes=1 here"
        )
