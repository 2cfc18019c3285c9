from __future__ import annotations

import shlex
import socket
import sys
from pathlib import Path

import pytest

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.plan.own_program import module_program
from accelerate_cpp.launch.workers.over_ssh import Machine, launcher_commands, left_out, read_hostfile, run_launchers


def _written(tmp_path: Path, text: str) -> Path:
    (tmp_path / "hosts").write_text(text)
    return tmp_path / "hosts"


def test_lines_are_names_with_slots_or_without(tmp_path: Path) -> None:
    assert read_hostfile(_written(tmp_path, "# ours\na slots=4\n\nb slots=4 # new\n")) == [
        Machine("a", 4),
        Machine("b", 4),
    ]
    assert read_hostfile(_written(tmp_path, "a\nb\n")) == [Machine("a"), Machine("b")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "at least one machine"),
        ("a\na\n", "each listed once"),
        ("a slots=2\nb slots=3\n", "the same slots=N"),
        ("a slots=2\nb\n", "the same slots=N"),
        ("a slots=0\n", "line 1: 'a slots=0'"),
        ("a\nb 4\n", "line 2: 'b 4'"),
        ("a\n-oProxyCommand=touch\n", "line 2: '-oProxyCommand=touch': expected the name of a machine"),
    ],
)
def test_file_of_another_form_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        read_hostfile(_written(tmp_path, text))


def test_missing_file_is_named() -> None:
    with pytest.raises(InvalidArgument, match="--hostfile absent: cannot be read"):
        read_hostfile(Path("absent"))


def test_machine_is_here_by_each_of_its_names() -> None:
    assert all(Machine(name).is_here for name in ("localhost", "127.0.0.1", socket.gethostname()))
    assert not Machine("elsewhere.invalid").is_here


def test_launchers_elsewhere_are_started_over_ssh_in_this_folder_with_what_they_need() -> None:
    environ = {"NCCL_DEBUG": "a b", "HF_TOKEN": "secret", "PYTHONPATH": "p", "ACCELERATE_USE_CPU": "1", "HOME": "/root"}
    machines = [Machine("a.invalid", 2), Machine("b.invalid", 2)]
    first, second = launcher_commands(machines, ["--cpu"], ["train.py", "--lr", "1"], "ssh -p 22", environ)
    assert first[:4] == ["ssh", "-p", "22", "a.invalid"]
    words = shlex.split(second[-1])
    assert words[:5] == ["cd", str(Path.cwd()), "&&", "exec", "env"]
    assert words[5:8] == ["ACCELERATE_USE_CPU=1", "NCCL_DEBUG=a b", "PYTHONPATH=p"]
    assert tuple(words[8:12]) == module_program("accelerate_cpp.commands.launch")
    told = ["--num_machines", "2", "--main_process_ip", "a.invalid", "--main_process_port", "29500"]
    assert words[12:] == [
        *told,
        *["--num_processes", "4", "--cpu", "--machine_rank", "1", "--ends_with_stdin", "train.py", "--lr", "1"],
    ]


def test_partition_of_infiniband_is_carried() -> None:
    first, _ = launcher_commands([Machine("a"), Machine("b")], [], ["train.py"], "ssh", {"NCCL_IB_PKEY": "0x8001"})
    assert "NCCL_IB_PKEY=0x8001" in shlex.split(first[-1])


def test_secrets_that_stay_here_are_named() -> None:
    environ = {"NCCL_IB_PKEY": "1", "HF_TOKEN": "s", "HF_ENDPOINT": "https://s@hub.invalid", "GITHUB_TOKEN": "s"}
    assert [*left_out([Machine("localhost"), Machine("b.invalid")], environ)] == [
        "launchers on other machines do not get HF_ENDPOINT, HF_TOKEN, as command lines would show it to all users; "
        "log in on these machines, or set it there"
    ]
    assert [*left_out([Machine("localhost")], environ)] == []
    assert [*left_out([Machine("b.invalid")], {"NCCL_IB_PKEY": "1"})] == []


@pytest.mark.parametrize("quiet", [False, True])
def test_run_names_the_secrets_that_stay_here(
    quiet: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cr3t")
    assert run_launchers([Machine("a.invalid")], [_python("pass")], quiet=quiet) == 0
    text = capfd.readouterr().err
    assert ("do not get HF_TOKEN" in text) == (not quiet)
    assert "s3cr3t" not in text


def test_first_machine_needs_a_name_that_others_know() -> None:
    machines = [Machine("localhost"), Machine("b.invalid")]
    with pytest.raises(InvalidArgument, match="use a name that they know"):
        launcher_commands(machines, [], ["train.py"], "ssh", {})
    first, _ = launcher_commands(machines, ["--main-process-ip=a"], ["train.py"], "ssh", {})
    assert tuple(first[:4]) == module_program("accelerate_cpp.commands.launch")


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_run_ends_well_when_all_launchers_do() -> None:
    machines = [Machine("a"), Machine("b")]
    assert run_launchers(machines, [_python("pass"), _python("pass")]) == 0


def test_first_failure_ends_the_others_through_their_standard_input(capfd: pytest.CaptureFixture[str]) -> None:
    machines = [Machine("a"), Machine("b")]
    waits = "import sys; sys.stdin.read()"
    assert run_launchers(machines, [_python(waits), _python("raise ValueError('boom')")]) == 1
    assert capfd.readouterr().err.endswith("ValueError: boom\n")


def test_program_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidArgument, match="no-such-ssh: cannot be started"):
        run_launchers([Machine("a")], [["no-such-ssh", "a"]])
