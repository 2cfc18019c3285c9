"""Options of tensor, context and sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import accelerate.utils.dataclasses as original
import pytest

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins import parallelism

FLASH = "kernels-community/flash-attn2"


@pytest.mark.parametrize(
    ("name", "arguments", "variables"),
    [
        ("TorchContextParallelConfig", {}, {}),
        ("TorchContextParallelConfig", {"cp_comm_strategy": "alltoall"}, {}),
        ("TorchContextParallelConfig", {"cp_comm_strategy": "ALLTOALL"}, {}),
        ("TorchContextParallelConfig", {}, {"CP_COMM_STRATEGY": "alltoall"}),
        ("TorchContextParallelConfig", {}, {"CP_COMM_STRATEGY": "around"}),
        ("DeepSpeedSequenceParallelConfig", {}, {}),
        ("DeepSpeedSequenceParallelConfig", {"sp_seq_length": 8}, {}),
        ("DeepSpeedSequenceParallelConfig", {"sp_seq_length_is_variable": False}, {}),
        ("DeepSpeedSequenceParallelConfig", {"sp_seq_length_is_variable": False, "sp_seq_length": 8}, {}),
        ("DeepSpeedSequenceParallelConfig", {}, {"SP_SEQ_LENGTH_IS_VARIABLE": "false", "SP_SEQ_LENGTH": "5"}),
        ("DeepSpeedSequenceParallelConfig", {}, {"SP_SEQ_LENGTH_IS_VARIABLE": "false"}),
        ("DeepSpeedSequenceParallelConfig", {}, {"SP_ATTN_IMPLEMENTATION": "flash_attention_3"}),
        *(
            ("DeepSpeedSequenceParallelConfig", {"sp_attn_implementation": attention}, {})
            for attention in (
                "sdpa",
                FLASH,
                f"{FLASH}@v1",
                "eager",
                "flex_attention",
                "a/b",
                "flash-attn",
                "a/flash_attn",
            )
        ),
        ("TorchTensorParallelConfig", {}, {}),
        ("TorchTensorParallelPlugin", {}, {}),
        ("TorchTensorParallelPlugin", {"tp_size": 4, "torch_device_mesh": None}, {}),
    ],
    ids=str,
)
def test_options_come_to_what_they_come_to_in_the_original(
    name: str, arguments: dict[str, Any], variables: dict[str, str], comes_to: Callable[..., Any]
) -> None:
    environment = {f"PARALLELISM_CONFIG_{variable}": text for variable, text in variables.items()}
    own = comes_to(getattr(parallelism, name), arguments, environment)
    if name == "TorchTensorParallelConfig":
        extra = [own.pop(name) for name in ("plan", "sequence_parallel", "loss_parallel")]  # not in the original
        assert extra == [None, False, False]
    assert own == comes_to(getattr(original, name), arguments, environment)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: parallelism.TorchContextParallelConfig("around"),
            "Invalid cp_comm_strategy: around, .*; expected one of allg",
        ),
        (lambda: parallelism.DeepSpeedSequenceParallelConfig(None, False), "need a length; pass sp_seq_length"),
        (
            lambda: parallelism.DeepSpeedSequenceParallelConfig(sp_attn_implementation="eager"),
            "sp_attn_implementation='eager'; expected one of flash_attention_2",
        ),
    ],
)
def test_a_refusal_says_what_is_expected(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make()


def test_a_length_from_the_environment_counts_also_where_lengths_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SEQ_LENGTH", "12")
    assert parallelism.DeepSpeedSequenceParallelConfig().sp_seq_length == 12


def test_asynchronous_tensor_parallelism_is_said_to_have_no_effect() -> None:
    with pytest.warns(UserWarning, match="enable_async_tp=True has no effect"):
        assert parallelism.TorchTensorParallelConfig(enable_async_tp=True).enable_async_tp


@pytest.mark.parametrize(("installed", "refused"), [("4.51.3", True), ("4.52.0", False), (None, False)])
def test_tensor_parallelism_refuses_an_old_transformers(
    installed: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from packaging.version import Version

    monkeypatch.setattr(parallelism, "is_installed", lambda name: installed is not None)
    monkeypatch.setattr(
        parallelism, "compare_versions", lambda name, sign, oldest: Version(str(installed)) < Version(oldest)
    )
    if refused:
        with pytest.raises(InvalidArgument, match=r"needs transformers 4\.52\.0 or newer"):
            parallelism.TorchTensorParallelConfig()
    else:
        assert not parallelism.TorchTensorParallelConfig().enable_async_tp
