"""The frozen configuration."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from accelerate_cpp.config.session_config import DynamoConfig, SessionConfig


def test_a_configuration_cannot_be_changed() -> None:
    config = SessionConfig()
    with pytest.raises(FrozenInstanceError):
        config.cpu = True  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.ddp_kwargs["bucket_cap_mb"] = 1  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        DynamoConfig({}).by_region = True  # type: ignore[misc]


def test_configurations_with_the_same_settings_are_equal() -> None:
    assert SessionConfig(ddp_kwargs={"static_graph": True}) == SessionConfig(ddp_kwargs={"static_graph": True})
    assert SessionConfig() != SessionConfig(mixed_precision="no")
