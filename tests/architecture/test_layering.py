"""The layers of the project know only what stands below them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import layering
from tree import REPOSITORY, Violation, parse, render

Check = Callable[[Path], Iterator[Violation]]
CHECKS: list[Check] = [
    layering.include_violations,
    layering.core_violations,
    layering.folder_name_violations,
    layering.import_violations,
    layering.cycle_violations,
    layering.relative_import_violations,
    layering.environment_violations,
    layering.label_violations,
    layering.global_violations,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_project_keeps_its_layers(check: Check) -> None:
    found = list(check(REPOSITORY))
    assert not found, render(found)


@pytest.mark.parametrize(
    ("check", "path", "text"),
    [
        (layering.include_violations, "csrc/core/a.h", "#include <torch/torch.h>\n"),
        (layering.include_violations, "csrc/core/a.h", "#  include <ATen/core/Tensor.h>\n"),
        (layering.include_violations, "csrc/core/a.h", "#include <c10/util/Half.h>\n"),
        (layering.include_violations, "csrc/core/a.cpp", "#include <pybind11/pybind11.h>\n"),
        (layering.include_violations, "csrc/core/a.cpp", "#include <Python.h>\n"),
        (layering.include_violations, "csrc/core/a.cpp", '#include "torch_bridge/tensor_view.h"\n'),
        (layering.include_violations, "csrc/core/a.cpp", 'auto* home = std::getenv("HOME");\n'),
        (layering.include_violations, "csrc/torch_bridge/a.cpp", "#include <torch/extension.h>\n"),
        (layering.include_violations, "csrc/torch_bridge/a.cpp", '#include "bindings/module.h"\n'),
        (layering.include_violations, "csrc/extras/a.cpp", "int a;\n"),
        (layering.core_violations, "csrc/core/comm/a.h", '#include "core/grad/gradient_exchange.h"\n'),
        (layering.core_violations, "csrc/core/amp/a.h", '#include "core/cuda/library.h"\n'),
        (layering.core_violations, "csrc/core/misc/a.h", "int a;\n"),
        (layering.folder_name_violations, "csrc/torch_bridge/ATen/a.h", "int a;\n"),
        (layering.import_violations, "python/accelerate_cpp/comm/a.py", "from accelerate_cpp.runtime import session\n"),
        (layering.import_violations, "python/accelerate_cpp/parallel/a.py", "import accelerate_cpp.launch.workers\n"),
        (layering.import_violations, "python/accelerate_cpp/parallel/a.py", "from accelerate_cpp import state\n"),
        (layering.import_violations, "python/accelerate_cpp/comm/a.py", "from accelerate_cpp.devices import tree\n"),
        (layering.import_violations, "python/accelerate_cpp/errors.py", "import accelerate_cpp.config.env_table\n"),
        (
            layering.import_violations,
            "python/accelerate_cpp/comm/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from accelerate_cpp.runtime import session\n",
        ),
        (
            layering.import_violations,
            "python/accelerate_cpp/plugins/a.py",
            "def f():\n    from accelerate_cpp.utils import imports\n",
        ),
        (layering.relative_import_violations, "python/accelerate_cpp/comm/a.py", "from . import process_group\n"),
        (layering.import_violations, "python/accelerate_cpp/misc/a.py", "x = 1\n"),
        (layering.environment_violations, "python/accelerate_cpp/state.py", "import os\nx = os.environ['A']\n"),
        (layering.environment_violations, "python/accelerate_cpp/comm/a.py", "import os\nx = os.getenv('A')\n"),
        (layering.environment_violations, "python/accelerate_cpp/comm/a.py", "from os import environ\n"),
        (layering.label_violations, "python/accelerate_cpp/parallel/a.py", "from x import DistributedType\n"),
        (layering.label_violations, "python/accelerate_cpp/runtime/a.py", "y = x.DistributedType.NO\n"),
        (
            layering.global_violations,
            "python/accelerate_cpp/parallel/a.py",
            "from accelerate_cpp.runtime import current\n",
        ),
    ],
)
def test_a_planted_violation_is_found(check: Check, path: str, text: str, plant: Callable[[str, str], Path]) -> None:
    found = list(check(plant(path, text)))
    assert [violation.path for violation in found] == [path]


@pytest.mark.parametrize(
    ("check", "path", "text"),
    [
        (
            layering.include_violations,
            "csrc/core/a.h",
            "// #include <torch/torch.h> would not compile; getenv neither\n",
        ),
        (layering.core_violations, "csrc/core/grad/a.h", '#include "core/amp/a.h"\n#include "core/comm/a.h"\n'),
        (layering.include_violations, "csrc/torch_bridge/a.h", "#include <ATen/core/Tensor.h>\n"),
        (layering.include_violations, "csrc/bindings/a.cpp", "#include <pybind11/pybind11.h>\n"),
        (layering.import_violations, "python/accelerate_cpp/state.py", "from accelerate_cpp.runtime import current\n"),
        (layering.import_violations, "python/accelerate_cpp/runtime/a.py", "import accelerate_cpp.parallel.single\n"),
        (layering.environment_violations, "python/accelerate_cpp/launch/a.py", "import os\nx = os.environ\n"),
        (layering.environment_violations, "python/accelerate_cpp/config/env_table.py", "import os\nx = os.environ\n"),
        (layering.label_violations, "python/accelerate_cpp/utils/a.py", "from x import DistributedType\n"),
        (layering.global_violations, "python/accelerate_cpp/commands/a.py", "import accelerate_cpp.runtime.current\n"),
        (layering.global_violations, "python/accelerate_cpp/runtime/a.py", "import accelerate_cpp.runtime.current\n"),
    ],
)
def test_what_the_layers_allow_is_not_reported(
    check: Check, path: str, text: str, plant: Callable[[str, str], Path]
) -> None:
    assert list(check(plant(path, text))) == []


def test_modules_that_import_each_other_are_found(plant: Callable[[str, str], Path]) -> None:
    plant("python/accelerate_cpp/comm/a.py", "from accelerate_cpp.comm import b\n")
    plant("python/accelerate_cpp/comm/b.py", "from accelerate_cpp.comm.c import thing\n")
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from accelerate_cpp.comm.a import other\n"
    root = plant("python/accelerate_cpp/comm/c.py", text)
    (found,) = layering.cycle_violations(root)
    assert "comm.a ↔ comm.b ↔ comm.c" in found.message
    root = plant("python/accelerate_cpp/comm/c.py", "import torch\n")
    parse.cache_clear()
    assert list(layering.cycle_violations(root)) == []
