"""What parses bytes from outside, each as a function of bytes: the Python half of the fuzzing of this package.

A target puts the bytes where its parser looks, in a folder of its own, and parses. It may return, or raise an error of
this package that has a message. Anything else is a finding: another exception, a hang, memory out of proportion (the
fuzzer limits both), a call that a file asked for, or the content of a file that is not in the folder. ``CANARY`` stands
for that: beside the folder lie files that hold it, to which names and links lead.
"""

from __future__ import annotations

import json
import os
import pickle
import selectors
import shutil
import socket
import struct
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint.default_planner  # else the first input would be slow
from safetensors.torch import save_file

from accelerate_cpp.checkpoint import manifest
from accelerate_cpp.checkpoint.files import read_pickle
from accelerate_cpp.checkpoint.fitting import check_optimizer
from accelerate_cpp.checkpoint.layout import read_models, read_optimizer, sharded_folder_name
from accelerate_cpp.checkpoint.names import OPTIMIZER_NAME, SHARDED_MODEL_NAME
from accelerate_cpp.checkpoint.safetensors_file import read_safetensors
from accelerate_cpp.checkpoint.sharded_folder import INDEX, SavedShards
from accelerate_cpp.comm.joining import MESSAGE
from accelerate_cpp.config import file as config_file
from accelerate_cpp.config.answers import answers_of_file
from accelerate_cpp.config.questions import Machine
from accelerate_cpp.errors import AccelerateError
from accelerate_cpp.launch.elastic.coordinator import Coordinator
from accelerate_cpp.launch.elastic.member import Member
from accelerate_cpp.launch.elastic.messages import Channel
from accelerate_cpp.launch.elastic.rounds import Terms
from accelerate_cpp.launch.fork import pickle_files
from accelerate_cpp.launch.plan.deepspeed_launcher import _slots
from accelerate_cpp.launch.plan.dry_run import render
from accelerate_cpp.launch.plan.launch_plan import LaunchOptions, resolve
from accelerate_cpp.launch.plan.machines import find_launchers
from accelerate_cpp.launch.view.live_table import table_html, table_lines, table_sentence
from accelerate_cpp.launch.workers.attendance import attendance
from accelerate_cpp.launch.workers.error_report import ErrorReport, LastOutput
from accelerate_cpp.launch.workers.over_mpi import hosts_of
from accelerate_cpp.launch.workers.over_ssh import launcher_commands, read_hostfile
from accelerate_cpp.launch.workers.worker_output import Tail
from accelerate_cpp.placement.checkpoint_reading import CheckpointFile, open_checkpoint
from accelerate_cpp.placement.offload import INDEX_NAME, OffloadedWeightsLoader
from accelerate_cpp.plugins.deepspeed import DeepSpeedPlugin
from accelerate_cpp.runtime.progress_board import Board
from make_seeds import shards_file

CANARY = 1234567.0
"""The value of every element in files outside of the folder that is parsed."""
CALLED: list[str] = []
"""What pickles have called; a target that leaves something here has found a way to execute code."""


class Finding(AssertionError):
    """The parser did what it must not do."""


def call(text: str) -> None:
    """What the pickles of the corpus try to call."""
    CALLED.append(text)


@dataclass(frozen=True)
class Target:
    """A parser.

    Attributes:
        parse: gets the bytes and an empty folder, beside which ``outside`` lies.
        in_message: what the message of a refusal has to name; empty where the caller adds that.
    """

    name: str
    parse: Callable[[bytes, Path], object]
    in_message: str = ""

    def run(self, data: bytes) -> None:
        """Parses ``data`` once; raises :class:`Finding`, or whatever else the parser raises that it must not."""
        CALLED.clear()
        with _folder() as folder:
            try:
                self.parse(data, folder)
            except AccelerateError as error:
                text = str(error)
                if len(text) < 20 or len(text) > 20_000 or self.in_message not in text:
                    raise Finding(f"the refusal says too little or too much: {text[:300]!r}") from error
        if CALLED:
            raise Finding(f"a file has called {CALLED}")


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir="/dev/shm") as name:
        outside, folder = Path(name, "outside"), Path(name, "folder")
        outside.mkdir()
        folder.mkdir()
        shutil.copy(_canary("safetensors"), outside / "a.safetensors")
        shutil.copy(_canary("bin"), outside / "a.bin")
        (folder / "link.safetensors").symlink_to("../outside/a.safetensors")
        (folder / "link").symlink_to("../outside")
        os.mkfifo(folder / "pipe.safetensors")
        yield folder


def _canary(suffix: str) -> Path:
    path = Path(tempfile.gettempdir(), f"canary-{os.getuid()}.{suffix}")
    if not path.is_file():
        tensors = {"a": torch.full((4,), CANARY)}
        waiting = path.with_suffix(f".{os.getpid()}")
        save_file(tensors, waiting) if suffix == "safetensors" else torch.save(tensors, waiting)
        os.replace(waiting, path)
    return path


def _look(values: Any) -> None:
    """Reads what a parser has returned, as a user would."""
    rest, seen = [values], set[int]()
    while rest:
        value = rest.pop()
        if isinstance(value, torch.Tensor):
            if value.numel() and value.is_floating_point() and bool((value.flatten()[:1].double() == CANARY).any()):
                raise Finding("what was read is the content of a file outside of the folder")
        elif isinstance(value, (Mapping, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            rest += value.values() if isinstance(value, Mapping) else value


def _safetensors(data: bytes, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(data)
    _look(read_safetensors(path))
    file = CheckpointFile(path)
    _look([(file.shape(name), file.read(name)) for name in file])


def _with_files(data: bytes, folder: Path, name: str) -> Path:
    save_file({"a": torch.ones(4), "b": torch.zeros(2, 2)}, folder / "in.safetensors")
    (folder / name).write_bytes(data)
    return folder / name


def _weights_index(data: bytes, folder: Path) -> None:
    _with_files(data, folder, "model.safetensors.index.json")
    for file in open_checkpoint(folder):
        _look([file.read(name) for name in file])


def _offload_index(data: bytes, folder: Path) -> None:
    _with_files(data, folder, INDEX_NAME)
    (folder / "a.dat").write_bytes(b"\0" * 16)
    (folder / "link.dat").symlink_to("../outside/a.bin")
    loader = OffloadedWeightsLoader(save_folder=folder)
    _look([loader[name] for name in loader])


def _pickle(data: bytes, folder: Path) -> None:
    """The first byte says whether the rest is the file, or the pickle in an archive whose tensors are sound."""
    path = folder / "optimizer.bin"
    if data[:1] == b"a":
        torch.save({"state": torch.ones(2)}, path)
        with zipfile.ZipFile(path) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for name, part in parts.items():
                archive.writestr(name, data[1:] if name.endswith("data.pkl") else part)
    else:
        path.write_bytes(data[1:])
    found = read_pickle(path, "the state of an optimizer", map_location="cpu")
    _look([found])


def _shards_index(data: bytes, folder: Path) -> None:
    """As ``load_state`` reads it: for a model and its optimizer, and as a whole."""
    (folder / INDEX).write_bytes(data)
    (folder / "__0_0.distcp").write_bytes(shards_file())
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name in (SHARDED_MODEL_NAME, OPTIMIZER_NAME):
        (folder / sharded_folder_name(name, 0)).symlink_to(".")
    refused = []
    for read in (
        lambda: read_models(folder, [model]),
        lambda: check_optimizer(_optimizer(folder, model, optimizer), optimizer, str(folder)),
        lambda: _read_shards(folder, "model"),
        lambda: _read_shards(folder, "optimizer"),
    ):
        try:
            _look([read()])
        except AccelerateError as error:  # each gets its turn
            refused.append(error)
    if refused:
        raise refused[0]


def _optimizer(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    state = read_optimizer(folder, 0, optimizer, [list(model.named_parameters())]).content
    _look(state)
    return state


def _read_shards(folder: Path, prefix: str) -> Any:
    saved = SavedShards(folder, prefix)
    saved.shapes()
    return saved.read(lambda _, shape, dtype: torch.empty(shape, dtype=dtype))


def _manifest(data: bytes, folder: Path) -> None:
    """The checksum is made right, so that what stands behind it is reached."""
    (folder / "a.bin").write_bytes(b"abc")
    try:
        body = json.loads(data)
        body.pop("xxh3", None)
        data = json.dumps({**body, "xxh3": manifest._checksum(body)}).encode()
    except (ValueError, RecursionError, AttributeError, TypeError):
        pass
    (folder / manifest.MANIFEST_NAME).write_bytes(data)
    found = manifest.read_manifest(folder)
    if found is None:
        raise Finding("there is a manifest")
    _ = [found.iteration + 1, found.world_size + 1, *(len(cursor) for cursor in found.cursors)]
    manifest.check_files(folder, found)


def _launch(path: Path) -> None:
    script = path.with_name("train.py")
    script.touch()
    render(resolve(LaunchOptions(str(script), config_file=str(path)), {"HOME": "/nowhere"}))


def _config(data: bytes, folder: Path) -> None:
    """The first byte says which of the two formats the rest has."""
    path = folder / ("config.json" if data[:1] == b"j" else "config.yaml")
    path.write_bytes(data[1:])
    for read in (config_file.load, _launch, lambda path: answers_of_file(path, Machine(0))):
        try:
            read(path)
        except AccelerateError as error:
            if len(str(error)) > 20_000:
                raise Finding("a message without end") from error


def _hostfile(data: bytes, folder: Path) -> None:
    path = folder / "hosts"
    path.write_bytes(data)
    for read in (lambda: launcher_commands(read_hostfile(path), [], ["train.py"], "ssh", {}), lambda: hosts_of(path)):
        try:
            read()
        except AccelerateError as error:
            if "hosts" not in str(error) and "first machine" not in str(error):
                raise Finding(f"a message that does not name the file: {error}") from error
    _slots(path)


def _schedulers(data: bytes, folder: Path) -> None:
    """The variables of Slurm, MPI and Kubernetes: lines of names and texts."""
    environ = {}
    for line in data.decode("utf-8", "replace").splitlines():
        name, _, text = line.partition("=")
        environ[name] = text
    find_launchers(environ)


def _deepspeed(data: bytes, folder: Path) -> None:
    path = folder / "zero.json"
    path.write_bytes(data)
    plugin = DeepSpeedPlugin(hf_ds_config=str(path))
    plugin.is_auto("train_batch_size")


def _board(data: bytes, folder: Path) -> None:
    descriptor = os.memfd_create("accelerate-cpp-board")
    try:
        board = Board(descriptor, [0, 1])
        os.pwrite(descriptor, data[: os.fstat(descriptor).st_size], 0)
        standings = board.look()
        for now in (0, 1 << 62):
            table_lines(standings, now, 80, 24)
            table_html(standings, now)
            table_sentence(standings, now, True)
        board.close()
    finally:
        os.close(descriptor)


def _attendance(data: bytes, folder: Path) -> None:
    with attendance() as here:
        for worker in (0, 1):
            here.variables(worker)
        for part in range(0, min(len(data), 4096), 7):
            os.write(here.descriptor, data[part : part + 7])
            here.read()
        absence = here.absence([0])
        if absence is not None and not {absence.worker, *absence.waiting} <= {0, 1}:
            raise Finding(f"workers that nobody has started: {absence}")
        # What worker 0 says after that counts, wherever the bytes before ended.
        here.variables(MESSAGE.size)


@contextmanager
def _connected(listener: socket.socket) -> Iterator[socket.socket]:
    """Connects to ``listener``; the end of the connection leaves no port in use for a while, as so many would."""
    with socket.create_connection(listener.getsockname()) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        yield client


def _elastic(data: bytes, folder: Path) -> None:
    """What the launchers of an elastic run say. The first byte says who hears it.

    They are the coordinator, to which a stranger speaks (``s``), one that has the secret (``h``) or a launcher that
    takes part (``p``), and a launcher to which the coordinator speaks (any other). Seals are left out, as no fuzzer
    can make one.
    """
    who, said = data[:1], data[1:]
    with socket.create_server(("127.0.0.1", 0)) as listener, _connected(listener) as client:
        client.sendall(said)
        client.shutdown(socket.SHUT_WR)
        if who in (b"s", b"h", b"p"):
            _tell_coordinator(listener, who)
        else:
            _tell_launcher(listener)


def _no_seals() -> Any:
    return mock.Mock(next=lambda text: b"")


def _tell_coordinator(listener: socket.socket, who: bytes) -> None:
    coordinator = Coordinator(listener, "127.0.0.1", Terms(1, 1))
    coordinator._selector.register(listener, selectors.EVENT_READ, None)
    coordinator._accept()
    (connection,) = coordinator._connections.values()
    if who != b"s":
        connection.channel._sent = _no_seals()
    if who == b"p":
        connection.is_known = True
        hello = {"name": "a", "order": 0, "most": 1, "num_processes": 1}
        coordinator._rounds.join(1, hello, "127.0.0.1", time.monotonic())
    try:
        while coordinator._connections:
            coordinator._read(1)
            coordinator._rounds.look(time.monotonic())
            coordinator._deliver()
        for later in (1e12, 2e12):
            coordinator._rounds.look(later)
        if not coordinator._rounds.is_over:
            raise Finding("a run that nobody takes part in goes on")
    finally:
        coordinator._selector.close()


def _tell_launcher(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    here, there = socket.socketpair()
    with connection, here, there:
        member = Member("127.0.0.1", 1, Terms(1, 2), here, 0, "")
        member._channel = Channel(connection)
        member._channel._sent = _no_seals()
        try:
            while (messages := member._channel.read()) is not None:
                for message in messages:
                    member._obey(message)
        finally:
            os.close(member._wake_reader)
            os.close(member._wake_writer)


def _error_report(data: bytes, folder: Path) -> None:
    tail = Tail()
    tail(data)
    for output in (LastOutput(tail.text, ErrorReport.parse(data)), LastOutput(tail.text)):
        assert isinstance(output.error + output.traceback, str)
        assert output.blames is None or all(type(rank) is int for rank in output.blames)


class _Harmless(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError("no classes here")


def _parcel(data: bytes, folder: Path) -> None:
    """The frame of an object in a memory file; what is in it comes from the same program and may call anything."""
    descriptor = os.memfd_create("accelerate-cpp-parcel")
    try:
        os.write(descriptor, data)
        harmless = mock.Mock(loads=lambda part, buffers: _Harmless(BytesIO(part), buffers=buffers).load())
        with mock.patch.object(pickle_files, "pickle", harmless):
            try:
                pickle_files.read(descriptor)
            except (struct.error, ValueError, pickle.UnpicklingError, EOFError, TypeError, IndexError, KeyError):
                pass  # as results, these are named beside the rank
            except (AttributeError, OverflowError, UnicodeDecodeError, MemoryError, ImportError):
                pass
    finally:
        os.close(descriptor)


TARGETS = {
    target.name: target
    for target in (
        Target("safetensors", _safetensors, "model.safetensors"),
        Target("weights_index", _weights_index, "safetensors"),
        Target("offload_index", _offload_index),
        Target("pickle", _pickle, "optimizer.bin"),
        Target("shards_index", _shards_index, "folder"),
        Target("manifest", _manifest),
        Target("config", _config),
        Target("hostfile", _hostfile, "hosts"),
        Target("schedulers", _schedulers),
        Target("deepspeed", _deepspeed),
        Target("board", _board),
        Target("attendance", _attendance),
        Target("elastic", _elastic),
        Target("error_report", _error_report),
        Target("parcel", _parcel),
    )
}
