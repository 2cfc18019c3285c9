"""What is asked of devices again and again, and which of two rows of one type answers."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate_cpp.devices import device as device_module
from accelerate_cpp.devices.device import Device


def test_a_package_that_cannot_be_imported_is_tried_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tried = tmp_path / "tried"
    text = f"open({str(tried)!r}, 'a').write('x')\nraise ImportError('no driver')"
    (tmp_path / "broken_devices.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    kind = Device(type="broken", title="Broken device", package="broken_devices")
    assert [kind.is_available(), kind.count(), kind.count()] == [False, 0, 0]
    assert tried.read_text() == "x"
    assert caplog.text.count("broken_devices is installed but cannot be imported") == 1


def test_a_package_that_is_not_there_is_looked_for_once_in_the_same_places(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    looked: list[str] = []
    found = device_module._is_installed
    monkeypatch.setattr(device_module, "_is_installed", lambda name: looked.append(name) or found(name))
    kind = Device(type="cpu", title="Device of a package", package="devices_of_test_device")
    assert [kind.count(), kind.count()] == [0, 0]
    assert looked == ["devices_of_test_device"]
    (tmp_path / "devices_of_test_device.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert kind.is_available()
    monkeypatch.delitem(sys.modules, "devices_of_test_device")


def test_of_two_rows_of_one_type_that_of_the_package_answers(tmp_path: Path) -> None:
    (tmp_path / "vendors.py").write_text(
        "from accelerate_cpp.devices.device import Device\nDEVICE = Device(type='cuda', title='Another GPU')\n"
    )
    info = tmp_path / "vendors-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendors\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[accelerate_cpp.devices]\ncuda = vendors:DEVICE\n")
    program = "from accelerate_cpp.devices.table import kind_of\nprint(kind_of('cuda:0').title)"
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "Another GPU"
