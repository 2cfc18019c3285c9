"""Fuzzes every target for so many seconds: ``python tests/fuzz/run_all.py SECONDS [TARGET…]``.

Two run at a time. A table at the end says how many inputs each has tried and how it ended; ``out/fuzz/summary.json``
has the same. The status is 1 if something broke: the input lies in ``out/fuzz/TARGET``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fuzz_targets import TARGETS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OUT = ROOT / "out" / "fuzz"
FUZZERS = ROOT / "build" / "fuzz" / "tests" / "fuzz" / "cpp"
CPP = ("cpp_channel", "cpp_handshake", "cpp_shared_memory")
AT_A_TIME = 2
PATIENCE_SECONDS = 600  # beyond the time that was asked for


def command_of(target: str, seconds: int) -> list[str]:
    """What fuzzes ``target``."""
    if target not in CPP:
        return [sys.executable, str(HERE / "fuzz_run.py"), target, str(seconds)]
    limits = [f"-max_total_time={seconds}", "-timeout=60", "-rss_limit_mb=3000", "-print_final_stats=1"]
    (OUT / target / "corpus").mkdir(parents=True, exist_ok=True)
    places = [f"-artifact_prefix={OUT / target}/", str(OUT / target / "corpus"), str(HERE / "corpus" / target)]
    return [str(FUZZERS / target.replace("cpp_", "fuzz_")), *limits, *places]


def fuzzed(target: str, seconds: int) -> dict[str, Any]:
    """The result of one target."""
    (OUT / target).mkdir(parents=True, exist_ok=True)
    log = OUT / target / "log"
    with log.open("wb") as file, subprocess.Popen(command_of(target, seconds), stdout=file, stderr=file) as process:
        try:
            process.wait(seconds + PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    text = log.read_text(errors="replace")
    tried = re.search(r"number_of_executed_units: (\d+)", text)
    cover = re.findall(r"cov: (\d+)", text)
    result = {
        "target": target,
        "seconds": seconds,
        "executions": int(tried[1]) if tried else 0,
        "branches": int(cover[-1]) if cover else 0,
        "status": process.returncode,
    }
    if result["executions"] == 0 and process.returncode == 0:  # it has fuzzed nothing
        result["status"] = 1
    print(f"{target}: {result['executions']} inputs, status {result['status']}", flush=True)
    return result


def main() -> int:
    """The program."""
    seconds, *names = sys.argv[1:]
    targets = names or [*TARGETS, *CPP]
    with ThreadPoolExecutor(AT_A_TIME) as threads:
        results = list(threads.map(lambda target: fuzzed(target, int(seconds)), targets))
    (OUT / "summary.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"{'target':20}{'inputs':>12}{'per second':>12}{'branches':>10}  status")
    for one in results:
        rate = one["executions"] / one["seconds"]
        broke = "" if one["status"] == 0 else f"broke: see {os.path.relpath(OUT / one['target'])}"
        print(f"{one['target']:20}{one['executions']:>12}{rate:>12.0f}{one['branches']:>10}  {broke or 'sound'}")
    return 0 if all(one["status"] == 0 for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
