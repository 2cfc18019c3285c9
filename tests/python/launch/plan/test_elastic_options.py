"""How a run is resolved whose machines may come and go."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.plan.launch_plan import ElasticRun, LaunchOptions, resolve


def _elastic(tmp_path: Path, **options: object) -> ElasticRun:
    (tmp_path / "train.py").touch()
    several = {"cpu": True, "num_machines": 3, "least_machines": 1, "num_processes": 6, "main_process_ip": "head"}
    plan = resolve(LaunchOptions(str(tmp_path / "train.py"), (), **(several | options)), {})  # type: ignore[arg-type]
    assert plan.elastic is not None
    return plan.elastic


def test_the_waits_of_a_run_can_be_chosen(tmp_path: Path) -> None:
    found = _elastic(tmp_path, rdzv_conf="last_call_timeout=60, keep_alive_interval=0.5")
    assert (found.least_machines, dict(found.options)) == (1, {"last_call_timeout": 60.0, "keep_alive_interval": 0.5})


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e9", "soon", ""])
def test_waits_that_no_clock_can_measure_are_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(InvalidArgument, match=r"--rdzv_conf .*each with a number above 0 and up to 1000000"):
        _elastic(tmp_path, rdzv_conf=f"keep_alive_interval={value}")


def test_options_of_another_rendezvous_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"--rdzv_conf 'is_host=1': .* expected last_call_timeout"):
        _elastic(tmp_path, rdzv_conf="is_host=1")
