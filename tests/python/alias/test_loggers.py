"""Loggers answer to the original's names under the alias, in processes of their own."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate_cpp.alias.loggers import ORIGINAL_OF

PACKAGE = Path(__file__).resolve().parents[3] / "python" / "accelerate_cpp"
LISTENING = """
import logging, sys

class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.names = []
    def emit(self, record):
        self.names.append(record.name)

names = ("accelerate.utils.environment", "accelerate.utils", "accelerate", "accelerate_cpp", "")
ears = {name: Kept() for name in names}
for name, ear in ears.items():
    logging.getLogger(name or None).addHandler(ear)
from accelerate.utils.environment import convert_dict_to_env_variables
convert_dict_to_env_variables({"A": ""})
print({name: ear.names for name, ear in ears.items()})
logging.getLogger("accelerate").setLevel("ERROR")
convert_dict_to_env_variables({"A": ""})
logging.getLogger("accelerate_cpp.utils")
convert_dict_to_env_variables({"A": ""})
print(len(ears[""].names))
"""


def test_every_logger_of_the_package_has_a_place_among_the_originals() -> None:
    made = {}
    for path in PACKAGE.rglob("*.py"):
        own = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for name in re.findall(r"logging\.getLogger\((.*?)\)", path.read_text()):
            if name == "__name__":
                made[own] = path
            elif name.startswith('"accelerate_cpp.'):
                made[name.strip('"').removeprefix("accelerate_cpp.")] = path
    assert set(ORIGINAL_OF) == set(made)


@pytest.mark.parametrize("before", ["", "import accelerate_cpp.utils.environment\n"], ids=["first", "after"])
def test_who_listens_to_the_originals_logger_hears_a_record_once(before: str) -> None:
    code = f"{before}import accelerate_cpp.compat\n{LISTENING}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heard, number = done.stdout.splitlines()
    own = "accelerate_cpp.utils.environment"
    names = ("accelerate.utils.environment", "accelerate.utils", "accelerate", "accelerate_cpp", "")
    assert eval(heard) == {name: [own] for name in names}
    assert number == "1"


def test_without_the_alias_the_originals_loggers_are_not_asked() -> None:
    own = logging.getLogger("accelerate_cpp.utils.environment")
    assert own.parent is not None
    assert not own.parent.name.startswith("accelerate.")
