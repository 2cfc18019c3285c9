"""The configuration file of launches, for scripts. Separate, so that only programs that write one load the CLI."""

from __future__ import annotations

from accelerate_cpp.commands.config import write_basic_config as write_basic_config
