from __future__ import annotations

from collections import UserDict, defaultdict
from typing import Any

import pytest
import torch

from accelerate_cpp.prepare.metrics import drop_repeated


@pytest.mark.parametrize("mapping", [dict, UserDict, lambda entries: defaultdict(list, entries)])
def test_rows_that_complete_the_last_batch_are_dropped_from_any_mapping(mapping: Any) -> None:
    gathered, local = mapping({"rows": torch.arange(4), "mean": torch.ones(2)}), mapping({"rows": torch.arange(2)})
    local["mean"] = torch.tensor(1.0)
    cut = drop_repeated(gathered, local, False, frozenset({4}), 3)
    assert type(cut) is type(gathered)
    assert cut["rows"].tolist() == [0, 1, 2]
    assert cut["mean"].tolist() == [1.0, 1.0]
