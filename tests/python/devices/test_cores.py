"""What Linux tells of cores and GPUs, from made-up copies of its files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from accelerate_cpp.devices.cores import Place, gpu_nodes, read_places


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Two sockets, each a node of two physical cores with two siblings, numbered as on most servers."""
    for node, cores in ((0, "0-1,4-5"), (1, "2-3,6-7"), (2, "")):
        _write(tmp_path / "node" / f"node{node}" / "cpulist", cores)
    _write(tmp_path / "node" / "possible", "0-2")
    for core in range(8):
        topology = tmp_path / "cpu" / f"cpu{core}" / "topology"
        _write(topology / "physical_package_id", str(core % 4 // 2))
        _write(topology / "thread_siblings_list", f"{core % 4},{core % 4 + 4}")
    return tmp_path


def test_cores_have_their_node_socket_and_physical_core(two_sockets: Path) -> None:
    places = read_places(range(8), two_sockets)
    assert places[1] == places[5] == Place(node=0, package=0, physical_core=1)
    assert places[2] == places[6] == Place(node=1, package=1, physical_core=2)
    assert len(set(places.values())) == 4


def test_only_the_cores_that_were_asked_for_are_looked_at(two_sockets: Path) -> None:
    assert read_places((5, 6), two_sockets) == {5: Place(0, 0, 1), 6: Place(1, 1, 2)}


def test_cores_of_which_nothing_is_known_are_each_a_physical_core_of_one_node(tmp_path: Path) -> None:
    assert read_places((3, 1), tmp_path) == {1: Place(0, 0, 1), 3: Place(0, 0, 3)}


def test_an_unknown_socket_is_the_first(tmp_path: Path) -> None:
    _write(tmp_path / "cpu" / "cpu0" / "topology" / "physical_package_id", "-1")
    assert read_places((0,), tmp_path) == {0: Place(0, 0, 0)}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux tells which cores there are")
def test_every_core_of_this_host_has_a_place() -> None:
    cores = os.sched_getaffinity(0)
    places = read_places(cores)
    assert places.keys() == cores
    assert all(place.physical_core <= core for core, place in places.items())


class Gpus:
    """A host with GPUs: a folder with the driver's, the kernel's and the device files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for number, (address, node, model) in enumerate(
            (("0000:1a:00.0", 1, "H200"), ("0000:05:00.0", 0, "H200"), ("0001:00:00.0", -1, "H200"))
        ):
            self.add(address, number, node, model)

    def add(self, address: str, minor: int, node: int, model: str) -> None:
        information = f"Model: \t\t NVIDIA {model}\nGPU UUID: \t GPU-{minor}abc\nBus Location: \t {address}\n"
        _write(self.folder / "driver" / address / "information", information + f"Device Minor: \t {minor}")
        _write(self.folder / "pci" / address / "numa_node", str(node))
        _write(self.folder / "dev" / f"nvidia{minor}", "")

    def nodes(self, **environ: str) -> list[int | None]:
        return gpu_nodes(environ, self.folder / "driver", self.folder / "dev", self.folder / "pci")


@pytest.fixture
def gpus(tmp_path: Path) -> Gpus:
    return Gpus(tmp_path)


def test_gpus_are_numbered_by_their_addresses_and_a_node_below_zero_is_unknown(gpus: Gpus) -> None:
    assert gpus.nodes() == [0, 1, None]


@pytest.mark.parametrize(
    ("visible", "nodes"),
    [
        ("1,0", [1, 0]),
        ("1", [1]),
        ("", []),
        ("0,-1,1", [0]),
        ("GPU-0abc, GPU-1", [1, 0]),
        ("GPU-", []),
        ("0,7", []),
        ("MIG-0abc", []),
    ],
)
def test_visible_devices_choose_and_order_them_and_other_names_leave_all_unknown(
    gpus: Gpus, visible: str, nodes: list[int | None]
) -> None:
    assert gpus.nodes(CUDA_VISIBLE_DEVICES=visible) == nodes


def test_gpus_of_other_containers_do_not_count(gpus: Gpus) -> None:
    (gpus.folder / "dev" / "nvidia1").unlink()
    assert gpus.nodes() == [1, None]


def test_gpus_of_different_models_need_an_order_that_is_asked_for(gpus: Gpus) -> None:
    gpus.add("0000:01:00.0", 3, 5, "T4")
    assert gpus.nodes() == []
    assert gpus.nodes(CUDA_DEVICE_ORDER="PCI_BUS_ID") == [5, 0, 1, None]


def test_a_host_without_the_driver_has_no_gpus(tmp_path: Path) -> None:
    assert gpu_nodes({}, tmp_path / "driver", tmp_path / "dev", tmp_path / "pci") == []


def test_a_gpu_of_which_the_kernel_tells_no_node_is_unknown(gpus: Gpus) -> None:
    (gpus.folder / "pci" / "0000:05:00.0" / "numa_node").unlink()
    assert gpus.nodes() == [None, 1, None]
