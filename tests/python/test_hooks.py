"""Hooks as users attach them. The meta device stands for one that is not the CPU."""

from __future__ import annotations

from typing import Any

import accelerate.hooks as original
import pytest
import torch
from torch import nn

import accelerate_cpp.hooks as own
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.hooks import (
    AlignDevicesHook,
    CpuOffload,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)


class Block(nn.Module):
    """A parameter of its own, a layer, and a module without tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((2,), 2.0))
        self.linear, self.act = nn.Linear(2, 2), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(x)) * self.scale


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.BatchNorm1d(2), Block()).eval()


X = torch.tensor([[1.0, -2.0], [3.0, 4.0]])


def devices(module: nn.Module) -> dict[str, str]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.device.type for name, tensor in tensors}


def shape_of(hook: Any) -> Any:
    """What a hook is, without what tells the two packages apart."""
    if type(hook).__name__ == "SequentialHook":
        return [shape_of(inner) for inner in hook.hooks]
    names = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
    weights = None if hook.weights_map is None else getattr(hook.weights_map, "prefix", "")
    return {name: getattr(hook, name) for name in names} | {"weights": weights}


def hooks_of(module: nn.Module) -> dict[str, Any]:
    return {name: shape_of(found._hf_hook) for name, found in module.named_modules() if hasattr(found, "_hf_hook")}


ATTACHED: list[tuple[str, dict[str, Any]]] = [
    ("attach_align_device_hook", {"execution_device": "cpu", "offload": True}),
    ("attach_align_device_hook", {"execution_device": "cpu", "skip_keys": "x"}),
    ("attach_align_device_hook", {"execution_device": "cpu", "offload": True, "preload_module_classes": ["Block"]}),
    ("attach_execution_device_hook", {"execution_device": "cpu", "skip_keys": ["x"]}),
    ("attach_execution_device_hook", {"execution_device": "cpu", "preload_module_classes": ["Block"]}),
    ("attach_align_device_hook_on_blocks", {"execution_device": "cpu"}),
    ("attach_align_device_hook_on_blocks", {"execution_device": "cpu", "offload": True}),
    (
        "attach_align_device_hook_on_blocks",
        {
            "execution_device": {"": "cpu", "0": "cpu", "1": "cpu", "2": "cpu"},
            "offload": {"0": False, "1": True, "2": True},
        },
    ),
    (
        "attach_align_device_hook_on_blocks",
        {"execution_device": {"0": "cpu", "1": "cpu", "2": "cpu"}, "offload": False, "skip_keys": "x"},
    ),
    ("attach_align_device_hook_on_blocks", {"execution_device": "cpu", "offload": {"": True}}),
    (
        "attach_align_device_hook_on_blocks",
        {"execution_device": {"": "cpu"}, "offload": {"": True}, "preload_module_classes": ["Block"]},
    ),
]


@pytest.mark.parametrize(("function", "options"), ATTACHED)
def test_modules_get_the_hooks_that_they_get_from_the_original(function: str, options: dict[str, Any]) -> None:
    found, expected = model(), model()
    before = found(X)
    for package, module in ((own, found), (original, expected)):
        arguments = dict(options)
        if options.get("offload") and "weights_map" not in arguments:
            arguments["weights_map"] = module.state_dict()
        getattr(package, function)(module, **arguments)
    assert hooks_of(found) == hooks_of(expected)
    assert devices(found) == devices(expected)
    assert torch.equal(found(X), before)
    assert devices(found) == devices(expected)
    remove_hook_from_submodules(found)
    assert hooks_of(found) == {}
    assert set(devices(found).values()) == {"cpu"}


def test_the_names_of_hooks_are_those_of_the_original() -> None:
    assert all(hasattr(original, name) for name in own.__all__)
    assert issubclass(AlignDevicesHook, ModelHook)
    assert issubclass(SequentialHook, ModelHook)


def test_attention_whose_parts_are_read_comes_as_a_whole() -> None:
    attention = nn.Sequential(nn.MultiheadAttention(2, 1).eval())
    before = attention[0](X, X, X)[0]
    attach_align_device_hook(attention, "cpu", offload=True)
    assert list(hooks_of(attention)) == ["0"]
    assert torch.equal(attention[0](X, X, X)[0], before)


def test_a_module_of_its_own_is_found_in_the_weights_without_a_prefix() -> None:
    module = nn.Linear(2, 2)
    before = module(X)
    attach_align_device_hook(module, "cpu", offload=True, weights_map=module.state_dict())
    assert torch.equal(module(X), before)


def test_weights_are_found_under_the_name_that_is_given() -> None:
    module, block = Block(), Block()
    weights = {f"outer.{name}": tensor for name, tensor in block.state_dict().items()}
    attach_align_device_hook(module, "cpu", offload=True, weights_map=weights, module_name="outer")
    assert torch.equal(module(X), block(X))


def test_tensors_beside_blocks_that_a_map_names_are_brought_too() -> None:
    module = model()
    before = module(X)
    devices_of = {"0.scale": "cpu", "0.linear": "cpu", "1": "cpu", "2": "cpu"}
    offload = {"0.scale": True, "0.linear": False, "1": False, "2": False}
    attach_align_device_hook_on_blocks(module, devices_of, offload, weights_map=module.state_dict())
    assert [name for name, device in devices(module).items() if device == "meta"] == ["0.scale"]
    assert torch.equal(module(X), before)


def test_buffers_beside_blocks_follow_the_first_block() -> None:
    module = nn.Sequential(Block())
    module[0].register_buffer("table", torch.ones(2), persistent=False)
    attach_align_device_hook_on_blocks(module, {"0.linear": "meta", "0.scale": "meta"}, False)
    assert devices(module)["0.table"] == "meta"


def test_a_model_with_tensors_of_its_own_brings_outputs_to_the_device_of_inputs() -> None:
    block = Block()
    before = block(X)
    attach_align_device_hook_on_blocks(
        block, {"scale": "cpu", "linear": "cpu"}, {"scale": True, "linear": True}, weights_map=block.state_dict()
    )
    assert block._hf_hook.io_same_device
    assert set(devices(block).values()) == {"meta"}
    assert torch.equal(block(X), before)


def test_a_module_goes_to_its_device_with_the_first_forward_pass() -> None:
    class Echo(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    hook = CpuOffload("meta")
    module = add_hook_to_module(Echo(2, 2), hook)
    assert module.weight.device.type == "cpu"
    assert module(X).device.type == "meta"
    assert module.weight.device.type == "meta"


def test_the_default_device_is_that_of_the_state(fresh_state: None) -> None:
    assert torch.device(CpuOffload().execution_device).type in ("cpu", "cuda", "xpu", "mps")
    with pytest.raises(InvalidArgument, match="device 99"):
        CpuOffload(99)


def test_a_module_is_sent_back_when_the_next_one_runs() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    sent: list[str] = []

    class Telling(UserCpuOffloadHook):
        def offload(self) -> None:
            sent.append("offload")
            super().offload()

    hook = CpuOffload("cpu")
    add_hook_to_module(first, hook)
    user = Telling(first, hook)
    add_hook_to_module(second, CpuOffload("cpu", prev_module_hook=user))
    second(X)
    assert sent == ["offload"]
    assert (user.model, user.hook) == (first, hook)
    user.remove()
    assert not hasattr(first, "_hf_hook")


def test_sending_back_brings_a_module_to_the_cpu() -> None:
    hook = CpuOffload("cpu")
    module = add_hook_to_module(nn.Linear(2, 2), hook)
    moved: list[Any] = []
    module.to = lambda *args, **_kwargs: moved.append(args) or module  # type: ignore[method-assign, func-returns-value]
    UserCpuOffloadHook(module, hook).offload()
    assert moved == [("cpu",)]


def test_weights_are_kept_in_one_dtype_and_used_in_another() -> None:
    module = nn.Linear(2, 2)
    before = module(X)
    hook = LayerwiseCastingHook(torch.float16, torch.float32, non_blocking=False)
    add_hook_to_module(module, hook)
    assert module.weight.dtype is torch.float16
    output = module(X)
    assert output.dtype is torch.float32
    assert torch.allclose(output, before, atol=1e-2)
    assert module.weight.dtype is torch.float16
    with pytest.raises(RuntimeError):
        module(torch.ones(1, 9))
    assert module.weight.dtype is torch.float16
    remove_hook_from_module(module)
    assert module.weight.dtype is torch.float16


def test_only_modules_with_weights_and_without_a_hook_get_one_for_inputs() -> None:
    module = model()
    own_hook = ModelHook()
    add_hook_to_module(module[1], own_hook)
    attach_execution_device_hook(module, "cpu")
    assert {name for name, found in module.named_modules() if hasattr(found, "_hf_hook")} == {
        *("", "0", "0.linear", "1", "2", "2.linear")
    }
    assert module[1]._hf_hook is own_hook
