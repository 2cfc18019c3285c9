"""Two hosts of two processes each, joined by a cable of 1 or 10 Gbit/s: torch DDP over Gloo, and ours.

The hosts are two network namespaces of this machine, whose cable a token bucket limits (tc(8), TBF); that takes root.
Measured are a step of a transformer with 25 million parameters, an all_reduce of 25 MB and one of 4 KB; and the CPU
time that rank 0, the leader of its host, spends on each, its threads included.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from interleaved import Measurement, command_line, compare, seconds_of_each, serve
from workers import Contestant, own_rank

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "distributed"))

from network_namespaces import ADDRESSES, INTERFACE, Host, Unavailable, two_hosts

NAMES = ("torch DDP over gloo", "accelerate_cpp")
PROCESSES = 4
HOSTS_VARIABLE = "BENCHMARK_HOSTS"
WORK = {"step": 2, "all_reduce 25 MB": 3, "all_reduce 4 KB": 30}
"""How often each is done in a turn."""
MEASUREMENTS = [
    f"{work}, {rate} Gbit/s{of_what}"
    for work in WORK
    for rate in (1, 10)
    for of_what in ("", ", CPU time of the leader")
]


def enter_host() -> None:
    """Goes to the host of this rank, the first two ranks to the first."""
    pids = os.environ[HOSTS_VARIABLE].split(",")
    Host(int(pids[own_rank() * len(pids) // PROCESSES]), "").enter()
    os.environ |= {"MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": INTERFACE}


def limit_cable(gigabits: str) -> None:
    """Of the host on which the caller is."""
    limit = ["tbf", "rate", f"{gigabits}gbit", "burst", "1mb", "latency", "100ms"]
    subprocess.run(["tc", "qdisc", "replace", "dev", INTERFACE, "root", *limit], check=True)


def worker(name: str) -> None:
    """One rank of a contestant."""
    enter_host()
    import torch
    import torch.distributed as dist
    from step import Way, accelerated_step, torch_step, transformer

    prepare = torch_step("gloo") if name == NAMES[0] else accelerated_step("accelerate_cpp")
    torch.manual_seed(0)
    model, batch = transformer()
    step = prepare(model, Way("transformer", 1))
    # Ours is measured as users call it: with tensors anywhere in memory.
    operands = {"all_reduce 25 MB": torch.ones(25_000_000 // 4), "all_reduce 4 KB": torch.ones(1024)}
    calls: dict[str, Callable[[], object]] = {"step": lambda: step(batch)}
    calls |= {work: (lambda operand=operand: dist.all_reduce(operand)) for work, operand in operands.items()}
    limited_to = ""

    def measure(measurement: str) -> list[float]:
        nonlocal limited_to
        work, rate, *of_what = measurement.split(", ")
        if rate != limited_to and own_rank() % 2 == 0:
            limit_cable(rate.split()[0])
        limited_to = rate
        dist.barrier()
        began = time.process_time()
        seconds = seconds_of_each(calls[work], WORK[work])
        return [(time.process_time() - began) / WORK[work]] if of_what else seconds

    serve(measure)
    dist.destroy_process_group()


def main() -> None:
    """Prints the table."""
    contestants = [Contestant(name) for name in NAMES]
    parser = command_line(__doc__, contestants)
    parser.set_defaults(processes=[PROCESSES], turns=7)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker)
        return
    if arguments.processes != [PROCESSES]:
        raise SystemExit(f"--processes is {PROCESSES} here: two on each of two hosts")
    try:
        with two_hosts() as hosts:
            os.environ[HOSTS_VARIABLE] = ",".join(str(host.pid) for host in hosts)
            compare(arguments, contestants, lambda _: [Measurement(name, NAMES) for name in MEASUREMENTS])
    except Unavailable as reason:
        raise SystemExit(f"this machine cannot be two hosts: {reason}") from None


if __name__ == "__main__":
    main()
