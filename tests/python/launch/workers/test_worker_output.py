from __future__ import annotations

import os
import select
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from accelerate_cpp.errors import SystemFailure
from accelerate_cpp.launch.workers import worker_output
from accelerate_cpp.launch.workers.worker_output import (
    LONGEST_LINE_BYTES,
    TAIL_BYTES,
    Descriptor,
    ForwardedText,
    LogFile,
    PrefixedText,
    Tail,
    blamed_ranks,
    last_error_line,
    last_traceback,
    say,
    to_all,
)

AMONG_HOST = "accelerate_cpp.errors.Timeout: among the ranks of one host: "
BETWEEN_HOSTS = "accelerate_cpp.errors.Timeout: between the hosts, with rank 1, rank 5: "
CHAIN = """noise
Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
    raise ValueError("boom")
accelerate_cpp.errors.PeerLost: rank 1 died
and more of the message
"""


def test_bytes_are_forwarded_unchanged_and_at_once() -> None:
    read_end, write_end = os.pipe()
    Descriptor(write_end)(b"\r 50%|\xff")
    assert os.read(read_end, 100) == b"\r 50%|\xff"
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize(
    ("chunks", "written"),
    [
        ([b"a\nb\n"], "> a\n> b\n"),
        ([b"a", b"b\n\n", b"c"], "> ab\n> \n> c\n"),
        ([b"a\r", b"\nb"], "> a\r\n> b\n"),
        ([b"\r 0%", b"\r50%", b"\r100%\n"], "> \r>  0%\r> 50%\r> 100%\n"),
        ([b"\xc3", b"\xa9\n"], "> é\n"),
        ([], ""),
    ],
)
def test_prefix_comes_before_each_line(chunks: list[bytes], written: str) -> None:
    text: list[str] = []
    sink = PrefixedText("> ", text.append)
    for chunk in [*chunks, b""]:
        sink(chunk)
    assert "".join(text) == written


def test_tail_keeps_only_the_end() -> None:
    tail = Tail()
    tail(b"first" + b"x" * TAIL_BYTES)
    tail(b"last")
    assert len(tail.text) == TAIL_BYTES
    assert tail.text.endswith("xlast")


def test_reader_that_left_does_not_stop_the_run() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    tail = Tail()
    sink = to_all(Descriptor(write_end), tail)
    sink(b"one")
    sink(b"two")
    os.close(write_end)
    assert tail.text == "onetwo"


def test_log_file_has_what_came_and_makes_its_folder(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "0" / "stderr.log", pytest.fail)
    file(b"one\n")
    file(b"two\n")
    file.close()
    file(b"three\n")
    assert (tmp_path / "0" / "stderr.log").read_bytes() == b"one\ntwo\n"


def test_a_folder_for_logs_that_cannot_be_made_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemFailure, match=r"Not a directory: .* choose another --log_dir.*stderr\.log"):
        LogFile(tmp_path / "file" / "0" / "stderr.log", pytest.fail)


def test_full_disk_is_complained_of_once() -> None:
    complaints: list[str] = []
    file = LogFile(Path("/dev/full"), complaints.append)
    file(b"one\n")
    file(b"two\n")
    assert complaints == ["/dev/full: No space left on device: later output of the workers is not in this file"]


def test_full_non_blocking_output_is_waited_for() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    data = b"x" * 300_000
    received = bytearray()

    def read_all() -> None:
        while len(received) < len(data):
            received.extend(os.read(read_end, 65536))

    reader = threading.Thread(target=read_all)
    reader.start()
    Descriptor(write_end)(data)
    reader.join()
    os.close(read_end)
    os.close(write_end)
    assert received == data


def test_character_that_is_split_between_chunks_arrives_whole() -> None:
    texts: list[str] = []
    forwarded = ForwardedText(texts.append)
    for byte in "aé€".encode():
        forwarded(bytes([byte]))
    forwarded(b"")
    assert "".join(texts) == "aé€"


def test_character_that_never_ends_is_replaced_at_the_end() -> None:
    texts: list[str] = []
    forwarded = ForwardedText(texts.append)
    forwarded("é".encode()[:1])
    forwarded(b"")
    assert texts == ["\ufffd"]


def test_last_traceback_of_a_chain_is_reported_to_its_end() -> None:
    assert last_traceback(CHAIN).startswith('Traceback (most recent call last):\n  File "a.py", line 3')
    assert last_traceback(CHAIN).endswith("and more of the message")


def test_last_lines_are_reported_without_a_traceback() -> None:
    assert last_traceback("one\ntwo\n") == "one\ntwo"
    assert last_traceback("") == ""


def test_error_line_is_the_one_that_closes_the_last_traceback() -> None:
    assert last_error_line(CHAIN) == "accelerate_cpp.errors.PeerLost: rank 1 died"
    assert last_error_line("PeerLost: no traceback") == ""


def test_rank_prefixes_of_torch_are_left_out_of_the_report() -> None:
    tail = "epoch 1\n" + "".join(
        f"[rank1]: {line}\n"
        for line in ("Traceback (most recent call last):", '  File "train.py", line 3, in f', "m.PeerLost: rank 0")
    )
    assert last_traceback(tail).splitlines() == [
        "Traceback (most recent call last):",
        '  File "train.py", line 3, in f',
        "m.PeerLost: rank 0",
    ]
    assert last_error_line(tail) == "m.PeerLost: rank 0"


@pytest.mark.parametrize(
    ("error", "blamed"),
    [
        ("ValueError: rank 3 is not mine", None),
        ("RuntimeError: shapes differ", None),
        ("accelerate_cpp.errors.CheckpointError: rank 3 has no file", None),
        ("accelerate_cpp.errors.PeerLost: all_reduce on rank 0 of 4: rank 3 has ended", (0, 3)),
        ("accelerate_cpp.errors.OtherRankFailed: save_state: rank 2 failed with ValueError: boom", (2,)),
        ("accelerate_cpp.errors.Timeout: nobody came", ()),
        (f"{AMONG_HOST}barrier (operation #3) at t.py:2 on rank 2 waited for rank 3: nothing came", (2, 3)),
        (f"{BETWEEN_HOSTS}all_gather of 24 uint8 on rank 3: rank 0 failed: its program ended", (0,)),
        (f"{BETWEEN_HOSTS}all_gather of 24 uint8 on rank 3 has not completed after 15 ms: it waited", (1, 5)),
        (f"{BETWEEN_HOSTS}all_gather on rank 3: rank 4 failed: barrier on rank 4 waited for rank 5: it ended", (5,)),
        (
            f"{AMONG_HOST}gather on rank 3 waited for rank 2: rank 2 failed: {BETWEEN_HOSTS}gather on rank 2 ended",
            (1, 5),
        ),
        ("jax.errors.JaxRuntimeError: INTERNAL: PeerLost: all_reduce on rank 0: rank 1 has ended", (0, 1)),
        ("jaxlib._jax.XlaRuntimeError: INTERNAL: Timeout: nobody came", ()),
        ("jax.errors.JaxRuntimeError: INTERNAL: rank 1 has a bug", None),
        ("RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:48300", ()),
        ("torch.distributed.DistNetworkError: Connection reset by peer", ()),
    ],
)
def test_error_that_comes_of_another_rank_names_it_if_it_knows(error: str, blamed: tuple[int, ...] | None) -> None:
    tail = f"[rank0]: Traceback (most recent call last):\n[rank0]:   File 'a.py'\n[rank0]: {error}\n"
    assert blamed_ranks(tail) == blamed


def test_without_an_error_nobody_is_blamed() -> None:
    assert blamed_ranks("rank 1 says hello") is None


def test_what_cannot_be_written_ends_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    primary, terminal = os.openpty()
    os.close(primary)  # the terminal has gone
    for descriptor in (full, terminal):
        write = Descriptor(descriptor)
        write(b"a")
        write(b"b")
        os.close(descriptor)
    say("told")
    assert capfd.readouterr().err == "told\n"


def test_after_an_interrupt_nothing_waits_for_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    write = Descriptor(write_end)
    os.set_blocking(write_end, False)
    with suppress(BlockingIOError):
        while True:
            os.write(write_end, b"x" * select.PIPE_BUF)
    os.set_blocking(write_end, True)
    monkeypatch.setattr(worker_output, "signalled", lambda: True)
    monkeypatch.setattr(worker_output, "_LOOK_MS", 1)
    monkeypatch.setattr(worker_output, "_PATIENCE_SECONDS", 0.01)
    write(b"lost")  # it would wait for ever
    write(b"lost, too")
    while len(os.read(read_end, 1 << 20)) == 1 << 20:
        pass
    write(b"heard")
    assert os.read(read_end, 1 << 20) == b"heard"
    os.close(read_end)
    os.close(write_end)


def test_a_line_without_an_end_takes_time_and_memory_in_proportion() -> None:
    """It took hours: each chunk was searched from each of its characters."""
    written: list[str] = []
    sink = PrefixedText("> ", written.append)
    for _ in range(64):
        sink(b"x" * LONGEST_LINE_BYTES)
    sink(b"\r")
    sink(b"\nshort\n")
    sink(b"")
    lines = "".join(written).splitlines()
    assert all(line.startswith("> ") for line in lines)
    assert sum(line.count("x") for line in lines) == 64 * LONGEST_LINE_BYTES
    assert lines[-1] == "> short"
    assert max(map(len, lines)) <= 2 * LONGEST_LINE_BYTES + 2
