"""The names of files."""

from __future__ import annotations

from pathlib import Path

import accelerate.utils.constants as original
import pytest
import torch

from accelerate_cpp.checkpoint import names
from accelerate_cpp.checkpoint.layout import random_states_file, shared_files
from accelerate_cpp.checkpoint.names import random_states_name
from accelerate_cpp.checkpoint.shards import save_in_shards
from accelerate_cpp.parallel.bundle import Bundle

_OTHERWISE = {"SHARDED_MODEL_NAME": "FSDP_MODEL_NAME"}


@pytest.mark.parametrize("name", [name for name in dir(names) if name.endswith("_NAME")])
def test_names_are_those_of_the_original(name: str) -> None:
    assert getattr(names, name) == getattr(original, _OTHERWISE.get(name, name))


@pytest.mark.parametrize("safe", [True, False])
def test_the_files_of_a_checkpoint_have_these_names(safe: bool) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    files = shared_files(Bundle([model], [optimizer], [], [schedule]), [model.state_dict()], safe_serialization=safe)
    weights = names.SAFE_WEIGHTS_NAME if safe else names.WEIGHTS_NAME
    assert [file.name for file in files] == [weights, names.OPTIMIZER_FILE, names.SCHEDULER_FILE]
    assert random_states_file(3, step=0).name == random_states_name(3) == "random_states_3.pkl"


@pytest.mark.parametrize(
    ("safe", "index", "pattern"),
    [
        (True, names.SAFE_WEIGHTS_INDEX_NAME, names.SAFE_WEIGHTS_PATTERN_NAME),
        (False, names.WEIGHTS_INDEX_NAME, names.WEIGHTS_PATTERN_NAME),
    ],
)
def test_shards_and_their_index_have_these_names(tmp_path: Path, safe: bool, index: str, pattern: str) -> None:
    save_in_shards({"a": torch.zeros(8), "b": torch.zeros(8)}, tmp_path, 32, safe_serialization=safe)
    shards = {pattern.format(suffix=f"-0000{number}-of-00002") for number in (1, 2)}
    assert {path.name for path in tmp_path.iterdir()} == {index, *shards}
