"""The configuration file of launches, for scripts. Apart, so that only who writes one loads the command line."""

from __future__ import annotations

from accelerate_cpp.commands.config import write_basic_config as write_basic_config
