"""The kernels for GPUs are accepted by NVIDIA's compiler, which needs no GPU."""

from __future__ import annotations

import re

import pytest

from accelerate_cpp._native import compile_gradient_kernels, cuda_capabilities

KERNELS = {
    *(f"{does}_{dtype}" for does in ("measure", "scale") for dtype in ("float32", "float64", "float16", "bfloat16")),
    "combine_chunks",
}


@pytest.fixture(scope="module")
def capabilities() -> list[int]:
    try:
        return cuda_capabilities()
    except OSError as error:
        pytest.skip(f"install nvidia-cuda-nvrtc to compile the kernels: {error}")


def test_every_architecture_gets_machine_code_for_every_kernel(capabilities: list[int]) -> None:
    assert {80, 90} <= set(capabilities)
    for capability in capabilities:
        architecture, image = compile_gradient_kernels(capability)
        assert architecture == f"sm_{capability}"
        assert image.startswith(b"\x7fELF")
        assert {name for name in KERNELS if f".text.{name}".encode() in image} == KERNELS


def test_a_device_newer_than_the_compiler_gets_code_for_its_driver_to_translate(capabilities: list[int]) -> None:
    architecture, image = compile_gradient_kernels(999)
    assert architecture == f"compute_{capabilities[-1]}"
    text = image.rstrip(b"\0").decode()
    assert set(re.findall(r"\.visible \.entry (\w+)\(", text)) == KERNELS
    # The elements travel 16 bytes at a time, and nothing is added up in an order that changes.
    assert re.search(r"ld\.global(\.nc)?\.v4", text)
    assert re.search(r"st\.global\.v4", text)
    assert not re.search(r"\b(atom|red)\.", text)


def test_a_device_older_than_all_that_the_compiler_knows_is_refused(capabilities: list[int]) -> None:
    with pytest.raises(OSError, match=rf"compute capability {capabilities[0]} and newer, not for 10"):
        compile_gradient_kernels(10)


def test_a_compiler_that_is_not_there_is_named() -> None:
    with pytest.raises(OSError, match=r"nowhere/libnvrtc\.so"):
        cuda_capabilities("nowhere/libnvrtc.so")
