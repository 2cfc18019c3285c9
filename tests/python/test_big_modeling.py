"""Models that are larger than a device. Everything runs on the CPU; the meta device stands for another one."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import accelerate as original
import accelerate.big_modeling as original_big_modeling
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import accelerate_cpp
from accelerate_cpp import big_modeling
from accelerate_cpp.big_modeling import (
    attach_layerwise_casting_hooks,
    check_device_map,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accelerate_cpp.errors import CheckpointError, InvalidArgument
from accelerate_cpp.hooks import remove_hook_from_submodules
from accelerate_cpp.placement.first_fit import device_of
from accelerate_cpp.utils import Workload, infer_auto_device_map


class Net(nn.Module):
    """Layers, buffers of both kinds, and a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.batchnorm, self.linear2 = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear2(self.batchnorm(self.linear1(x)))


class Tied(nn.Module):
    """A language model in miniature: the head shares the embeddings' weight, and blocks have tensors beside layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(7, 4)
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embeddings.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embeddings(words) * self.scale))


X = torch.randn(2, 3)
WORDS = torch.tensor([[1, 2, 3]])
IN_THREE_PLACES = {"linear1": "cpu", "batchnorm": "disk", "linear2": "disk"}


def net() -> Net:
    return Net().eval()


def empty(kind: type[nn.Module] = Net) -> Any:
    with init_empty_weights():
        return kind().eval()


def devices(module: nn.Module) -> dict[str, str]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.device.type for name, tensor in tensors}


@pytest.fixture
def saved(tmp_path: Path) -> Net:
    model = net()
    save_file(model.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    return model


def test_names_are_those_of_the_original_and_the_same_objects_everywhere() -> None:
    assert all(hasattr(original_big_modeling, name) for name in big_modeling.__all__)
    for name in set(big_modeling.__all__) & set(accelerate_cpp.__all__):
        assert getattr(accelerate_cpp, name) is getattr(big_modeling, name)
    with init_on_device("meta"):
        assert nn.Linear(1, 1).weight.device.type == "meta"


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("way", ["cpu", "disk"])
def test_an_offloaded_model_computes_the_same(tmp_path: Path, way: str, offload_buffers: bool) -> None:
    model, expected = net(), net()
    before = model(X)
    for package, found, folder in ((big_modeling, model, "ours"), (original, expected, "theirs")):
        if way == "cpu":
            result = package.cpu_offload(found, execution_device="cpu", offload_buffers=offload_buffers)
        else:
            result = package.disk_offload(
                found, str(tmp_path / folder), execution_device="cpu", offload_buffers=offload_buffers
            )
        assert result is found
    assert devices(model) == devices(expected)
    assert torch.equal(model(X), before)
    assert devices(model) == devices(expected)
    remove_hook_from_submodules(model)
    assert set(devices(model).values()) == {"cpu"}
    assert torch.equal(model(X), before)


def test_a_model_is_offloaded_from_the_device_of_its_first_parameter() -> None:
    model = net()
    parameters = dict(model.named_parameters())
    cpu_offload(model)
    assert model.linear1._hf_hook.execution_device == torch.device("cpu")
    remove_hook_from_submodules(model)
    assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
    assert cpu_offload(nn.ReLU())(torch.tensor(-1.0)) == 0


def test_weights_can_be_given_to_a_model_without_values(saved: Net) -> None:
    model = cpu_offload(empty(), "cpu", state_dict=saved.state_dict())
    assert torch.equal(model(X), saved(X))
    with pytest.raises(InvalidArgument, match=r"no values of linear1\.weight.* pass them as state_dict"):
        cpu_offload(empty(), "cpu")


def test_an_offload_folder_is_used_again(tmp_path: Path, saved: Net) -> None:
    disk_offload(copy.deepcopy(saved), tmp_path / "o", "cpu")
    model = disk_offload(empty(), tmp_path / "o", "cpu")
    assert torch.equal(model(X), saved(X))
    with pytest.raises(InvalidArgument, match="neither in the model nor in"):
        disk_offload(empty(), tmp_path / "other", "cpu")


def test_modules_that_read_others_weights_come_as_a_whole() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.inner.weight

    model, x = nn.Sequential(Reading()), torch.ones(2)
    before = model(x)
    cpu_offload(model, "cpu", preload_module_classes=["Reading"])
    assert torch.equal(model(x), before)


def test_a_model_with_a_hook_is_sent_back_by_hand() -> None:
    first, hook = cpu_offload_with_hook(nn.Linear(3, 3), execution_device="cpu")
    second, second_hook = cpu_offload_with_hook(nn.Linear(3, 3), "cpu", prev_module_hook=hook)
    assert second_hook.hook.prev_module_hook is hook
    assert second(first(X)).shape == (2, 3)
    hook.offload()
    assert first.weight.device.type == "cpu"
    hook.remove()
    assert not hasattr(first, "_hf_hook")


@pytest.mark.parametrize(
    "device_map",
    [
        IN_THREE_PLACES,
        {"linear1": "disk", "batchnorm": "cpu", "linear2": "cpu"},
        {"linear1.weight": "disk", "linear1.bias": "cpu", "batchnorm": "cpu", "linear2": "cpu"},
        {"": "disk"},
        {"": "cpu"},
        {"": "cpu", "batchnorm": "disk", "linear2.weight": "disk"},
        {"": "disk", "batchnorm": "cpu", "linear2.bias": "cpu"},
    ],
)
@pytest.mark.parametrize("force_hooks", [False, True])
def test_a_dispatched_model_computes_the_same(tmp_path: Path, device_map: dict[str, Any], force_hooks: bool) -> None:
    model = net()
    before = model(X)
    assert dispatch_model(model, device_map, offload_dir=tmp_path, force_hooks=force_hooks) is model
    assert torch.equal(model(X), before)
    assert model.hf_device_map == device_map
    away = {name for name, device in devices(model).items() if device == "meta"}
    assert away == {name for name, _ in model.named_parameters() if device_of(device_map, name) == "disk"}
    assert hasattr(model, "_hf_hook") == (force_hooks or bool(away))
    copied = copy.deepcopy(model)
    remove_hook_from_submodules(model)
    assert torch.equal(copied(X), before)
    assert torch.equal(model(X), before)
    assert model.to(torch.float64).linear1.weight.dtype is torch.float64


def test_hooks_of_a_dispatched_model_are_those_of_the_original(tmp_path: Path) -> None:
    models = net(), net()
    for package, model, folder in zip((big_modeling, original), models, ("ours", "theirs"), strict=True):
        package.dispatch_model(model, IN_THREE_PLACES, offload_dir=str(tmp_path / folder), skip_keys="x")
    assert devices(models[0]) == devices(models[1])
    found, expected = (
        {
            name: (hook.execution_device, hook.offload, hook.io_same_device, hook.place_submodules, hook.skip_keys)
            for name, module in model.named_modules()
            if (hook := getattr(module, "_hf_hook", None)) is not None and not hasattr(hook, "hooks")
        }
        for model in models
    )
    assert found == expected


def test_weights_on_the_cpu_run_on_the_main_device() -> None:
    model = net()
    dispatch_model(model, {"linear1": "cpu", "batchnorm": "meta", "linear2": "meta"})
    assert str(model.linear1._hf_hook.execution_device) == "meta"
    assert model(X.to("meta")).device.type == "meta"
    assert model.linear1._hf_hook.weights_map["weight"].device.type == "cpu"


def test_shared_weights_and_tensors_beside_modules_are_dispatched(tmp_path: Path) -> None:
    model = Tied()
    before = model(WORDS)
    device_map = infer_auto_device_map(model, {"cpu": 180})
    assert set(device_map.values()) == {"cpu", "disk"}
    assert device_map["scale"] == "cpu"
    dispatch_model(model, device_map, offload_dir=tmp_path)
    assert torch.equal(model(WORDS), before)
    everything = dict.fromkeys(["embeddings", "scale", "block", "head"], "disk")
    model = Tied()
    before = model(WORDS)
    dispatch_model(model, everything, offload_dir=tmp_path / "all")
    assert set(devices(model).values()) == {"meta"}
    assert torch.equal(model(WORDS), before)


def test_an_index_may_name_tensors_of_a_checkpoint(tmp_path: Path, saved: Net) -> None:
    file = str(tmp_path / "model.safetensors")
    index = {name: {"safetensors_file": file, "weight_name": name, "dtype": "float32"} for name in saved.state_dict()}
    model = empty()
    model.batchnorm = copy.deepcopy(saved.batchnorm)
    dispatch_model(model, {"linear1": "disk", "batchnorm": "cpu", "linear2": "disk"}, offload_index=index)
    assert torch.equal(model(X), saved(X))


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ({"linear1": "cpu"}, "device_map gives no device to batchnorm.weight"),
        ({"linear1": 99, "": "cpu"}, "device 99"),
        ({"": 99}, "device 99"),
        (IN_THREE_PLACES, "puts batchnorm, linear2 on the disk: pass an offload_dir"),
    ],
)
def test_a_map_that_cannot_be_followed_is_refused_and_nothing_is_moved(device_map: Any, message: str) -> None:
    model = net()
    with pytest.raises(InvalidArgument, match=message):
        dispatch_model(model, device_map)
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    assert set(devices(model).values()) == {"cpu"}
    assert not hasattr(model, "hf_device_map")


def test_a_model_without_values_cannot_be_dispatched() -> None:
    with pytest.raises(InvalidArgument, match=r"no values of linear1\.weight, .* load a checkpoint before"):
        dispatch_model(empty(), {"": "cpu"})


@pytest.mark.parametrize("method", ["to", "cuda"])
def test_a_model_with_offloaded_weights_refuses_to_be_moved(tmp_path: Path, method: str) -> None:
    model = dispatch_model(net(), IN_THREE_PLACES, offload_dir=tmp_path)
    with pytest.raises(RuntimeError, match=r"'batchnorm\.weight' is offloaded"):
        getattr(model, method)("cpu" if method == "to" else 0)


@pytest.mark.parametrize(
    ("device_map", "options", "expected"),
    [
        (None, {}, None),
        ("auto", {}, {"": "cpu"}),
        ("balanced", {"max_memory": {"cpu": 170}}, IN_THREE_PLACES),
        ("sequential", {"max_memory": {"cpu": 170}}, IN_THREE_PLACES),
        ("balanced_low_0", {"max_memory": {"cpu": 170}, "offload_buffers": True}, IN_THREE_PLACES),
        ("auto", {"max_memory": {"cpu": "1GB"}, "no_split_module_classes": ["Linear"]}, {"": "cpu"}),
        (IN_THREE_PLACES, {"force_hooks": True}, IN_THREE_PLACES),
        ({"": "cpu"}, {"strict": True, "offload_state_dict": True}, {"": "cpu"}),
    ],
)
def test_a_checkpoint_is_loaded_and_dispatched(
    tmp_path: Path, saved: Net, device_map: Any, options: dict[str, Any], expected: Any
) -> None:
    model = load_checkpoint_and_dispatch(
        empty(), tmp_path, device_map=device_map, offload_folder=tmp_path / "offload", **options
    )
    assert torch.equal(model(X), saved(X))
    assert getattr(model, "hf_device_map", None) == expected


def test_a_map_that_is_chosen_leaves_room_for_a_workload(tmp_path: Path, saved: Net) -> None:
    options: dict[str, Any] = {"max_memory": {"cpu": 400}, "offload_folder": tmp_path / "offload"}
    workload = Workload(class_bytes={"Linear": 100})
    for way in ("auto", "balanced", "balanced_low_0", "sequential"):
        model = load_checkpoint_and_dispatch(empty(), tmp_path, way, **options)
        assert set(model.hf_device_map.values()) == {"cpu"}
        model = load_checkpoint_and_dispatch(empty(), tmp_path, way, **options, workload=workload)
        assert device_of(model.hf_device_map, "linear2") == "disk"
        assert torch.equal(model(X), saved(X))


def test_weights_are_converted_as_they_are_loaded(tmp_path: Path, saved: Net) -> None:
    model = load_checkpoint_and_dispatch(
        empty(), tmp_path, IN_THREE_PLACES, offload_folder=tmp_path / "o", dtype="float64"
    )
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert model.batchnorm._hf_hook.weights_map["weight"].dtype is torch.float64


def test_a_shared_weight_of_a_checkpoint_is_found_under_all_its_names_on_the_disk(tmp_path: Path) -> None:
    model = Tied()
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    loaded = load_checkpoint_and_dispatch(
        empty(Tied),
        tmp_path,
        {"embeddings": "disk", "head": "disk", "": "cpu"},
        offload_folder=tmp_path / "o",
        strict=True,
    )
    assert torch.equal(loaded(WORDS), model(WORDS))


def test_another_word_than_those_for_maps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="device_map='foo': expected a mapping or one of 'auto', 'balanced'"):
        load_checkpoint_and_dispatch(empty(), tmp_path, "foo")


def test_a_damaged_checkpoint_leaves_the_model_without_values(tmp_path: Path, saved: Net) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    model = empty()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_checkpoint_and_dispatch(model, tmp_path, "auto")
    assert devices(model) == devices(empty())


def test_checking_and_loading_are_offered_here_too(tmp_path: Path, saved: Net) -> None:
    model = empty()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_device_map(model, {"": 0})
    load_checkpoint_in_model(model, tmp_path)
    assert torch.equal(model(X), saved(X))


CASTS: list[dict[str, Any]] = [
    {},
    {"skip_modules_pattern": "2"},
    {"skip_modules_pattern": ["^1", "2.0"]},
    {"skip_modules_classes": (nn.Conv1d, nn.Sequential)},
    {"skip_modules_classes": (nn.Linear,), "non_blocking": True},
]


@pytest.mark.parametrize("options", CASTS)
def test_layers_are_kept_in_the_dtypes_that_the_original_keeps_them_in(options: dict[str, Any]) -> None:
    def model() -> nn.Module:
        inner = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        return nn.Sequential(
            nn.Linear(2, 2), nn.Conv1d(2, 2, 1), inner, nn.Embedding(2, 2), nn.ConvTranspose2d(1, 1, 1)
        )

    found, expected = model(), model()
    attach_layerwise_casting_hooks(found, torch.float16, torch.float32, **options)
    original_big_modeling.attach_layerwise_casting_hooks(expected, torch.float16, torch.float32, **options)
    assert {name: tensor.dtype for name, tensor in found.named_parameters()} == {
        name: tensor.dtype for name, tensor in expected.named_parameters()
    }
    assert found[0](torch.ones(2)).dtype is torch.float32


def test_one_class_to_skip_needs_no_list_and_attention_is_left_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.MultiheadAttention(2, 1))
    attach_layerwise_casting_hooks(model, torch.float16, torch.float32, skip_modules_classes=nn.Linear)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    x = torch.ones(1, 2)
    assert model[1](x, x, x)[0].dtype is torch.float32
