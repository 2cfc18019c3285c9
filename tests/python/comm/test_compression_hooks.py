"""Which communication hook options ask for; tests/distributed/test_comm_hooks.py says what they do."""

from __future__ import annotations

import pytest
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

from accelerate_cpp.comm.compression_hooks import average_as_bf16, hook_for
from accelerate_cpp.errors import InvalidArgument


def test_nothing_is_compressed_by_default() -> None:
    assert hook_for("no") is None


def test_each_option_is_its_hook() -> None:
    assert hook_for("fp16") == (None, default_hooks.fp16_compress_hook)
    assert hook_for("bf16") == (None, average_as_bf16)


@pytest.mark.parametrize(
    ("name", "function"),
    [("power_sgd", power_sgd.powerSGD_hook), ("batched_power_sgd", power_sgd.batched_powerSGD_hook)],
)
def test_power_sgd_has_a_state_with_the_options(name: str, function: object) -> None:
    found = hook_for(name, state_options={"matrix_approximation_rank": 3})
    assert found is not None
    assert found[0].matrix_approximation_rank == 3
    assert found[1] is function


@pytest.mark.parametrize(("hook", "wrapper"), [("no", "fp16"), ("fp16", "power_sgd"), ("fp16", "other")])
def test_a_wrapper_without_a_hook_and_what_is_no_wrapper_are_refused(hook: str, wrapper: str) -> None:
    with pytest.raises(InvalidArgument, match="expected a wrapper among 'no', 'fp16', 'bf16'"):
        hook_for(hook, wrapper)
