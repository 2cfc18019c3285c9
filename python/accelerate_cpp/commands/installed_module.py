"""The files of the C++ module in this installation: where they are, and how new ones take their place."""

from __future__ import annotations

import base64
import csv
import fcntl
import hashlib
import io
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import accelerate_cpp
from accelerate_cpp.errors import AccelerateError, BuildMismatch
from accelerate_cpp.installation import minor_of, obstacle

BUILD_INFO = "_build_info.py"
_PIN = re.compile(rb"^Requires-Dist: *torch *[(<>=!~][^\r\n;]*", re.MULTILINE)


@dataclass(frozen=True)
class InstalledModule:
    """Where the C++ module is, what it is built from, and what pip knows about it.

    Attributes:
        folder: has the module and ``_build_info.py``.
        sources: has ``CMakeLists.txt`` and ``csrc``: those in the wheel or, of an editable install, the clone.
        records: pip's folder about the installation, or ``None`` if pip did not install it.
    """

    folder: Path
    sources: Path
    records: Path | None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other rebuilds away. The lock goes with the process, however that ends.

        Raises:
            AccelerateError: another process has it.
        """
        listing = self.sources / "CMakeLists.txt"  # locking it on NFS takes the right to write
        with listing.open("r+b" if os.access(listing, os.W_OK) else "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise AccelerateError(f"another rebuild is at work in {self.folder}; wait until it has ended") from None
            yield

    def replace(self, built: Path, torch: str) -> None:
        """Puts the files in folder ``built`` in the place of the old ones, and pins ``torch`` in pip's records.

        All of them are complete, beside the old ones, before the first one is moved. The module is moved before the
        file that says which torch it is for: whoever imports it between the two is refused.
        """
        with tempfile.TemporaryDirectory(prefix=".rebuilt-", dir=self.folder) as name:
            moves: dict[Path, Path] = {}
            for file in sorted(built.iterdir(), key=lambda file: file.name == BUILD_INFO):
                moves[self.folder / file.name] = Path(shutil.copy2(file, name))
            for path, text in self._records_for(moves, torch).items():
                staged = Path(name, f"records-{path.name}")
                staged.write_bytes(text)
                shutil.copymode(path, staged)
                moves[path] = staged
            with _no_interruption():
                for place, staged in moves.items():
                    staged.replace(place)

    def _records_for(self, moves: Mapping[Path, Path], torch: str) -> dict[Path, bytes]:
        """METADATA with the pin of ``torch``, and RECORD with the hashes of that and of all that is moved."""
        if self.records is None:
            return {}
        about, record = self.records / "METADATA", self.records / "RECORD"
        pin = f"Requires-Dist: {torch_requirement(torch)}".encode()
        pinned = _PIN.sub(pin, about.read_bytes())
        root = self.records.parent
        changed = {place.relative_to(root): staged.read_bytes() for place, staged in moves.items()}
        changed[about.relative_to(root)] = pinned
        rows = {row[0]: row for row in csv.reader(record.read_text(encoding="utf-8").splitlines())}
        for path, content in changed.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            rows[path.as_posix()] = [path.as_posix(), f"sha256={digest}", str(len(content))]
        table = io.StringIO()
        csv.writer(table, lineterminator="\n").writerows(rows.values())
        return {about: pinned, record: table.getvalue().encode()}


def torch_requirement(torch: str) -> str:
    """What a module that was built for ``torch`` requires: ``torch>=2.13,<2.14`` for ``2.13.0``."""
    major, minor = (int(number) for number in minor_of(torch).split("."))
    return f"torch>={major}.{minor},<{major}.{minor + 1}"


def find_installed_module() -> InstalledModule:
    """The C++ module that an import of this package would load.

    Raises:
        BuildMismatch: the package is not installed.
        AccelerateError: its sources are not there, or this user may not write to its folder.
    """
    info = find_spec("accelerate_cpp._build_info")
    if info is None or info.origin is None:
        raise BuildMismatch(obstacle(None, None))
    folder = Path(info.origin).parent
    package = Path(accelerate_cpp.__file__).parent
    candidates = (package / "_sources", package.parents[1])
    sources = next((place for place in candidates if (place / "CMakeLists.txt").is_file()), None)
    if sources is None:
        raise AccelerateError(f"the sources of the C++ module are not in {candidates[0]}; reinstall accelerate-cpp")
    if not os.access(folder, os.W_OK):
        raise AccelerateError(f"{folder} cannot be written to; run this as the user who installed accelerate-cpp")
    records = next(folder.parent.glob("accelerate_cpp-*.dist-info"), None)
    return InstalledModule(folder, sources, records)


@contextmanager
def _no_interruption() -> Iterator[None]:
    """Lets signals that would end this process wait."""
    waiting = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waiting)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
