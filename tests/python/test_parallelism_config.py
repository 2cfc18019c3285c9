"""Sizes of kinds of parallelism, and their mesh."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallelism_config import ParallelismConfig
from accelerate_cpp.plugins.parallelism import (
    DeepSpeedSequenceParallelConfig,
    PipelineParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)

PROPERTIES = [
    name for name, value in vars(ParallelismConfig).items() if isinstance(value, property) and name != "pp_enabled"
]
OWN = ("pp_size", "pp_handler")  # not in the original
SIZES: list[dict[str, int]] = [
    {},
    {"dp_replicate_size": 2},
    {"dp_shard_size": 2},
    {"tp_size": 2},
    {"cp_size": 2},
    {"sp_size": 2},
    {"dp_shard_size": 2, "cp_size": 2},
    {"dp_replicate_size": 2, "sp_size": 2},
    {"dp_shard_size": 2, "tp_size": 3, "sp_size": 2},
    {"dp_replicate_size": 2, "dp_shard_size": 3, "cp_size": 2, "tp_size": 2},
]


@pytest.fixture
def connect() -> Iterator[Callable[[int, int], None]]:
    """``connect(rank, world_size)`` makes this process one of as many pretended ones."""

    def connect(rank: int, world_size: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    yield connect
    if dist.is_initialized():
        dist.destroy_process_group()


def test_the_fields_are_the_originals() -> None:
    own, theirs = ParallelismConfig(), accelerate.ParallelismConfig()
    assert [field.name for field in fields(own)] == [*(field.name for field in fields(theirs)), *OWN]
    assert [getattr(own, field.name) for field in fields(theirs)] == [
        getattr(theirs, field.name) for field in fields(theirs)
    ]
    assert [getattr(own, name) for name in OWN] == [1, None]
    assert ParallelismConfig(tp_size=2) == ParallelismConfig(tp_size=2) != ParallelismConfig()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_what_sizes_mean_is_what_it_means_in_the_original(sizes: dict[str, int]) -> None:
    own, theirs = ParallelismConfig(**sizes), accelerate.ParallelismConfig(**sizes)
    assert {name: getattr(own, name) for name in PROPERTIES} == {name: getattr(theirs, name) for name in PROPERTIES}
    for name in ("tp_handler", "cp_handler", "sp_handler"):
        assert repr(getattr(own, name)) == repr(getattr(theirs, name))


@pytest.mark.parametrize(
    "variables",
    [
        {"DP_REPLICATE_SIZE": "2"},
        {"DP_SHARD_SIZE": "3", "TP_SIZE": "2", "CP_SIZE": "2", "CP_COMM_STRATEGY": "alltoall"},
        {"SP_SIZE": "2", "SP_ATTN_IMPLEMENTATION": "sdpa"},
        {"CP_BACKEND": "torch", "SP_BACKEND": "deepspeed"},
    ],
    ids=str,
)
def test_variables_fill_what_no_argument_says(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}", text)
    own, theirs = ParallelismConfig(), accelerate.ParallelismConfig()
    assert [repr(getattr(own, field.name)) for field in fields(theirs)] == [
        repr(getattr(theirs, field.name)) for field in fields(theirs)
    ]
    assert ParallelismConfig(dp_replicate_size=5, tp_size=1, cp_size=1).dp_replicate_size == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp_size": 0}, "tp_size=0; expected an integer, 1 or more"),
        ({"dp_shard_size": -1}, "dp_shard_size=-1"),
        ({"cp_size": "2"}, "cp_size='2'"),
        ({"sp_size": 1.5}, "sp_size=1.5"),
        ({"cp_size": 2, "sp_size": 2}, "cp_size=2 and sp_size=2 would both split sequences"),
        ({"cp_backend": "deepspeed"}, "cp_backend='deepspeed'; expected 'torch'"),
        ({"sp_backend": "torch"}, "sp_backend='torch'; expected 'deepspeed'"),
        ({"tp_size": 2, "tp_handler": 3}, "tp_handler=3; expected a TorchTensorParallelConfig"),
        ({"cp_size": 2, "cp_handler": 3}, "cp_handler=3; expected a TorchContextParallelConfig"),
        ({"sp_size": 2, "sp_handler": 3}, "sp_handler=3; expected a DeepSpeedSequenceParallelConfig"),
        ({"pp_size": 2, "pp_handler": 3}, "pp_handler=3; expected a PipelineParallelConfig"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ParallelismConfig(**arguments)


def test_stages_are_the_outermost_dimension_and_get_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ParallelismConfig(pp_size=2, dp_replicate_size=2, tp_size=2)
    assert config._get_mesh() == (("pp", "dp_replicate", "tp"), (2, 2, 2))
    assert (config.total_size, config.data_parallel_size, config.non_data_parallel_size) == (8, 2, 4)
    assert (config.axes(), config.non_dp_dim_names) == ({"dp_replicate": 2, "tp": 2, "pp": 2}, ["tp", "pp"])
    assert config.pp_handler == PipelineParallelConfig("1f1b")
    monkeypatch.setenv("PARALLELISM_CONFIG_PP_SIZE", "3")
    monkeypatch.setenv("PARALLELISM_CONFIG_PP_SCHEDULE", "gpipe")
    monkeypatch.setenv("PARALLELISM_CONFIG_PP_MICRO_BATCHES", "4")
    assert ParallelismConfig().pp_handler == PipelineParallelConfig("gpipe", 4)


def test_a_size_that_is_changed_later_counts() -> None:
    config = ParallelismConfig()
    config.tp_size, config.dp_shard_size = 2, 3
    assert (config.total_size, config.data_parallel_size, config.non_data_parallel_size) == (6, 3, 2)
    assert (config.active_mesh_dims, config.tp_enabled, config.dp_shard_enabled) == (["dp_shard", "tp"], True, True)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_names_and_sizes_of_the_mesh_are_the_originals(sizes: dict[str, int]) -> None:
    ours, theirs = ParallelismConfig(**sizes), accelerate.ParallelismConfig(**sizes)
    assert ours._get_mesh() == theirs._get_mesh()
    assert ours._sizes == {**theirs._sizes, "pp": 1}


def test_joint_dimensions_are_asked_for_by_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Mesh(dict[Any, Any]):
        def __getitem__(self, names: Any) -> Any:
            asked.append(names)
            return SimpleNamespace(_flatten=lambda joint: None)

    monkeypatch.setattr("torch.distributed.device_mesh.init_device_mesh", lambda *_, **__: Mesh())
    ParallelismConfig(dp_shard_size=2, cp_size=2).build_device_mesh("cpu")
    assert asked == [["dp_shard"], ["dp_shard", "cp"], ["dp_shard", "cp"]]


def test_a_mesh_of_ones_own_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(
        "torch.distributed.device_mesh.init_device_mesh", lambda *args, **names: made.append((args, names)) or {}
    )
    monkeypatch.setattr(ParallelismConfig, "_get_mesh", lambda self: (("ep",), (4,)))
    ParallelismConfig().build_device_mesh("cpu")
    assert made == [(("cpu", (4,)), {"mesh_dim_names": ("ep",)})]


def test_a_size_can_be_set_by_its_dimension() -> None:
    config = ParallelismConfig()
    config._set_size("tp", 4)
    assert (config.tp_size, config._sizes["tp"]) == (4, 4)
    with pytest.raises(InvalidArgument, match="no dimension 'ep'; expected one of dp_replicate, "):
        config._set_size("ep", 2)
    with pytest.raises(InvalidArgument, match="tp_size=0; expected"):
        config._set_size("tp", 0)


def test_sizes_are_compared_with_the_processes() -> None:
    two = SimpleNamespace(num_processes=2, multi_device=True)
    filled = ParallelismConfig()
    filled._validate_accelerator(two)  # type: ignore[arg-type]
    assert filled.dp_replicate_size == 2
    alone = ParallelismConfig()
    alone._validate_accelerator(SimpleNamespace(num_processes=1, multi_device=False))  # type: ignore[arg-type]
    assert alone.total_size == 1
    expected = r"ParallelismConfig total_size \(4\) does not match num_processes \(2\)"
    with pytest.raises(InvalidArgument, match=expected):
        ParallelismConfig(dp_shard_size=4)._validate_accelerator(two)  # type: ignore[arg-type]
    idle = ParallelismConfig(dp_shard_size=2, cp_handler=TorchContextParallelConfig())
    with pytest.warns(UserWarning, match="cp_handler is set, but cp_size is set to 1"):
        idle._validate_accelerator(two)  # type: ignore[arg-type]


def test_handlers_of_the_users_own_are_kept() -> None:
    tensor, context = TorchTensorParallelConfig(), TorchContextParallelConfig("alltoall")
    sequence = DeepSpeedSequenceParallelConfig(sp_seq_length=8)
    both = ParallelismConfig(tp_size=2, cp_size=2, tp_handler=tensor, cp_handler=context)
    assert (both.tp_handler, both.cp_handler) == (tensor, context)
    assert ParallelismConfig(sp_size=2, sp_handler=sequence).sp_handler is sequence


def test_it_can_be_written_as_json() -> None:
    written = json.loads(json.dumps(ParallelismConfig(cp_size=2, dp_shard_size=2).to_json()))
    assert written["dp_shard_size"] == 2
    assert written["cp_handler"] == {"cp_comm_strategy": "allgather"}
    assert ParallelismConfig(**{**written, "cp_handler": None}) == ParallelismConfig(cp_size=2, dp_shard_size=2)


@pytest.mark.filterwarnings("ignore:Slicing a flattened dim")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_mesh_is_the_originals_with_its_joint_dimensions(
    sizes: dict[str, int], connect: Callable[[int, int], None]
) -> None:
    config = ParallelismConfig(**sizes)
    connect(config.total_size - 1, config.total_size)
    theirs, mesh = accelerate.ParallelismConfig(**sizes).build_device_mesh("cpu"), config.build_device_mesh("cpu")
    if mesh is None or theirs is None:
        assert mesh is theirs is None
        assert config.sp_enabled or config.total_size == 1
        return
    assert (mesh.mesh_dim_names, tuple(mesh.shape)) == (theirs.mesh_dim_names, tuple(theirs.shape))
    assert mesh.mesh.tolist() == theirs.mesh.tolist()
    joint = {"dp": config.dp_dim_names, "dp_cp": config.dp_cp_dim_names, "dp_shard_cp": config.dp_shard_cp_dim_names}
    for name in (*config.active_mesh_dims, *(name for name, parts in joint.items() if parts)):
        assert mesh[name].mesh.tolist() == theirs[name].mesh.tolist()
        assert mesh[name].get_local_rank() == mesh[name].size() - 1


def test_the_mesh_is_built_once_and_again_for_other_sizes(connect: Callable[[int, int], None]) -> None:
    connect(0, 6)
    config = ParallelismConfig(dp_shard_size=2)
    assert config.device_mesh is None
    with pytest.raises(InvalidArgument, match="there is no mesh yet; pass device_type"):
        config.get_device_mesh()
    mesh = config.get_device_mesh("cpu")
    assert mesh is not None
    assert config.get_device_mesh() is config.get_device_mesh("cpu") is config.device_mesh is mesh
    with pytest.raises(InvalidArgument, match="there is already a mesh of cpu devices"):
        config.get_device_mesh("cuda")
    config.tp_size = 3
    other = config.get_device_mesh()
    assert other is not None
    assert (other.mesh_dim_names, tuple(other.shape)) == (("dp_shard", "tp"), (2, 3))
