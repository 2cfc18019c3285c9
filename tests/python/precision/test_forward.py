"""Forward passes in mixed precision."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch

from accelerate_cpp.precision.forward import install, remove, to_fp32
from accelerate_cpp.precision.precision import precision_for

BF16 = precision_for("bf16", torch.device("cpu"))


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.computed_in: torch.dtype | None = None

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        out = self.linear(x)
        self.computed_in = out.dtype
        return {"logits": out * scale, "count": torch.ones(1, dtype=torch.int64)}


def test_it_computes_in_low_precision_and_returns_fp32() -> None:
    network = install(Network(), BF16)
    out = network(torch.ones(2, 4), scale=2.0)
    assert network.computed_in == torch.bfloat16
    assert (out["logits"].dtype, out["count"].dtype) == (torch.float32, torch.int64)
    assert torch.equal(out["logits"], out["logits"].bfloat16().float())


def test_results_stay_low_where_that_was_asked_for() -> None:
    assert install(Network(), BF16, keeps_low_precision=True)(torch.ones(2, 4))["logits"].dtype == torch.bfloat16


def test_full_precision_and_a_second_time_change_nothing() -> None:
    network = Network()
    install(network, precision_for("no", torch.device("cpu")))
    assert "forward" not in network.__dict__
    first = install(network, BF16).forward
    assert install(network, BF16).forward is first


def test_it_can_be_removed() -> None:
    network = remove(install(Network(), BF16))
    network(torch.ones(2, 4))
    assert network.computed_in == torch.float32
    assert not {"forward", "_original_forward"} & network.__dict__.keys()
    assert remove(network) is network


def test_a_compiled_module_keeps_its_forward_for_later() -> None:
    compiled = torch.compile(torch.nn.Linear(4, 4), backend="eager")
    x = torch.ones(2, 4)
    install(compiled, BF16, keeps_low_precision=True)
    assert compiled(x).dtype == torch.bfloat16
    assert compiled._orig_mod(x).dtype == torch.float32
    assert remove(compiled)(x).dtype == torch.float32


def test_a_module_can_be_compiled_later() -> None:
    network = install(torch.nn.Linear(4, 4), BF16)
    x = torch.ones(2, 4)
    assert torch.equal(torch.compile(network, backend="eager", fullgraph=True)(x), network(x))


def test_a_forward_of_the_instance_is_used_and_comes_back() -> None:
    network = Network()
    own = network.forward = lambda x: x.sum()
    assert install(network, BF16)(torch.ones(3)).item() == 3.0
    assert remove(network).forward is own


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda network: pickle.loads(pickle.dumps(network))])
def test_a_copy_computes_with_its_own_parameters(duplicate) -> None:  # type: ignore[no-untyped-def]
    network = install(Network(), BF16)
    other = duplicate(network)
    with torch.no_grad():
        other.linear.weight.zero_()
        other.linear.bias.fill_(1.0)
    assert torch.equal(other(torch.ones(1, 4))["logits"], torch.ones(1, 4))
    assert other.computed_in == torch.bfloat16
    assert not torch.equal(network(torch.ones(1, 4))["logits"], torch.ones(1, 4))


def test_the_signature_is_that_of_the_module() -> None:
    assert list(inspect.signature(install(Network(), BF16).forward).parameters) == ["x", "scale"]


def test_only_half_precisions_are_converted() -> None:
    data = (torch.ones(1).half(), [torch.ones(1).double()], {"a": torch.ones(1).bfloat16(), "b": "text"})
    converted = to_fp32(data)
    assert converted[0].dtype == converted[2]["a"].dtype == torch.float32
    assert converted[1][0].dtype == torch.float64
    assert converted[2]["b"] == "text"


def test_gradients_flow_through_the_conversion() -> None:
    network = install(Network(), BF16)
    network(torch.ones(2, 4))["logits"].sum().backward()
    assert network.linear.weight.grad is not None
    assert network.linear.weight.grad.dtype == torch.float32
