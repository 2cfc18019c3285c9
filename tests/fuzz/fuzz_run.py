"""Fuzzes one target with atheris, coverage-guided: ``python tests/fuzz/fuzz_run.py TARGET [SECONDS] [OPTIONS]``.

What it finds is written to ``out/fuzz/TARGET``: new inputs to ``corpus``, what breaks to ``crash-…``, ``timeout-…`` or
``oom-…``, which the same command runs again as its only option. It ends with status 0 if nothing broke. Options are
those of libFuzzer; ``-merge=1`` with two folders makes a small corpus of a large one.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
from pathlib import Path
from types import FunctionType

import atheris

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OBSERVED = {"accelerate_cpp", "yaml", "json", "re", "zipfile"}
# A refusal takes milliseconds; the machine may be loaded. The limit of memory is far above what torch itself takes.
LIMITS = ("-timeout=60", "-rss_limit_mb=3000", "-max_len=65536", "-print_final_stats=1")


def _instrument() -> None:
    """Lets the fuzzer see which branches are taken. Its own hook does not see imports of an editable installation."""
    for one in gc.get_objects():
        if isinstance(one, FunctionType) and str(one.__module__).partition(".")[0] in OBSERVED:
            with contextlib.suppress(Exception):  # of what it cannot rewrite, branches are not seen
                atheris.instrument_func(one)


def main() -> None:
    """The program."""
    name, *options = sys.argv[1:]
    sys.path.insert(0, str(HERE))
    import fuzz_targets

    _instrument()
    target = fuzz_targets.TARGETS[name]
    out = ROOT / "out" / "fuzz" / name
    (out / "corpus").mkdir(parents=True, exist_ok=True)
    seconds = options.pop(0) if options and options[0].isdecimal() else None
    places = (
        [] if any(Path(option).exists() for option in options) else [str(out / "corpus"), str(HERE / "corpus" / name)]
    )
    limit = [] if seconds is None else [f"-max_total_time={seconds}"]

    def run(data: bytes) -> None:
        with contextlib.suppress(RecursionError) if name == "parcel" else contextlib.nullcontext():
            target.run(data)

    warnings.simplefilter("ignore")
    atheris.Setup([sys.argv[0], *LIMITS, *limit, f"-artifact_prefix={out}/", *options, *places], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
