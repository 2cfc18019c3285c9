"""Where the cores and the GPUs of this host are: what Linux tells in ``/sys`` and ``/proc``, read without a library."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from accelerate_cpp.config.env_table import parse_cores


@dataclass(frozen=True, order=True)
class Place:
    """Where a core is. Cores at the same place are siblings: the threads of one physical core.

    Attributes:
        node: of NUMA; 0 where Linux names none.
        package: the socket; 0 where Linux names none.
        physical_core: the first of the siblings.
    """

    node: int
    package: int
    physical_core: int


def read_places(cores: Collection[int], system: Path = Path("/sys/devices/system")) -> dict[int, Place]:
    """The place of each of ``cores``. What Linux does not tell counts as one node, one socket, and no siblings."""
    node_of = {
        core: int(folder.name.removeprefix("node"))
        for folder in (system / "node").glob("node[0-9]*")
        for core in parse_cores(_text(folder / "cpulist"))
    }
    return {core: _place(core, node_of.get(core, 0), system / "cpu" / f"cpu{core}" / "topology") for core in cores}


def _place(core: int, node: int, topology: Path) -> Place:
    siblings = parse_cores(_text(topology / "thread_siblings_list")) or (core,)
    package = _text(topology / "physical_package_id")
    return Place(node, max(0, int(package or 0)), siblings[0])


def _text(file: Path) -> str:
    """What stands in ``file``; empty where Linux, or the container, does not have it."""
    return file.read_text().strip() if file.is_file() else ""


@dataclass(frozen=True, order=True)
class _Gpu:
    address: str
    model: str
    uuid: str


def gpu_nodes(
    environ: Mapping[str, str],
    driver: Path = Path("/proc/driver/nvidia/gpus"),
    devices: Path = Path("/dev"),
    pci: Path = Path("/sys/bus/pci/devices"),
) -> list[int | None]:
    """The NUMA node of each NVIDIA GPU that ``environ`` lets a worker see, in CUDA's order; ``None`` if it is unknown.

    Empty when it cannot be told without CUDA which GPU has which number.
    """
    gpus = sorted(_gpus(driver, devices))
    if len({gpu.model for gpu in gpus}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return []  # CUDA numbers the fastest first
    visible = _visible(gpus, environ.get("CUDA_VISIBLE_DEVICES"))
    nodes = [int(_text(pci / gpu.address / "numa_node") or -1) for gpu in visible]
    return [None if node < 0 else node for node in nodes]


def _gpus(driver: Path, devices: Path) -> Iterator[_Gpu]:
    """The GPUs that the driver names and whose device nodes this process has, as a container has only some."""
    for file in driver.glob("*/information"):
        lines = (line.partition(":") for line in file.read_text().splitlines())
        facts = {name.strip(): value.strip() for name, _, value in lines}
        if (devices / f"nvidia{facts.get('Device Minor')}").exists():
            yield _Gpu(file.parent.name, facts.get("Model", ""), facts.get("GPU UUID", ""))


def _visible(gpus: list[_Gpu], text: str | None) -> list[_Gpu]:
    """The ``gpus`` that ``CUDA_VISIBLE_DEVICES`` names, in its order; none when it names something else."""
    if text is None:
        return gpus
    visible: list[_Gpu] = []
    for entry in (part.strip() for part in text.split(",")):
        if entry.isdecimal():
            named = gpus[int(entry) : int(entry) + 1]
        else:
            named = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
        if len(named) != 1:
            return visible if not entry or entry.startswith("-") else []
        visible += named
    return visible
