"""What the checks of the scripts raise with."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from accelerate_cpp import Accelerator

Check = Callable[[Accelerator], None]


def require(what: str, expected: object, found: object) -> None:
    """Raises ``RuntimeError`` unless ``expected`` was ``found``."""
    if expected != found:
        raise RuntimeError(f"{what}: expected {expected}, found {found}")


def run(accelerator: Accelerator, checks: Iterable[Check]) -> None:
    """Runs ``checks`` on every process; the main process names each that has passed."""
    for check in checks:
        check(accelerator)
        accelerator.wait_for_everyone()
        accelerator.print(f"{check.__name__}: passed on {accelerator.num_processes} process(es)")
    accelerator.end_training()
