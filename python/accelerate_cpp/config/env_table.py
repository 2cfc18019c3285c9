"""Every environment variable the package reads or writes, one row each; those of plugins are in ``plugin_variables``.

This module and ``launch/`` are the only places that touch ``os.environ``. Importing it loads neither torch nor the C++
core.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from accelerate_cpp.errors import InvalidArgument

T = TypeVar("T")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable: how its text becomes a value, and how a value becomes its text."""

    name: str
    parse: Callable[[str], T]
    render: Callable[[T], str]
    default: T
    doc: str

    def get(self, environ: Mapping[str, str] | None = None) -> T:
        """The value in ``environ`` (default ``os.environ``), or the default when unset or empty."""
        text = (os.environ if environ is None else environ).get(self.name, "")
        if text == "":
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise InvalidArgument(f"environment variable {self.name}={text!r}: {error}. Meaning: {self.doc}") from None

    def is_set(self, environ: Mapping[str, str] | None = None) -> bool:
        """Whether the variable is present with a non-empty text."""
        return (os.environ if environ is None else environ).get(self.name, "") != ""


def parse_integer(text: str) -> int:
    """A whole number; anything else raises ``ValueError``."""
    try:
        return int(text)
    except ValueError:
        raise ValueError("expected an integer") from None


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError("expected a number of seconds, 0 or more")
    return seconds


_TRUE = {"y", "yes", "t", "true", "on", "1"}
_FALSE = {"n", "no", "f", "false", "off", "0"}


def parse_flag(text: str) -> bool:
    """``yes/true/on/1`` and ``no/false/off/0`` in any case; anything else raises ``ValueError``."""
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError("expected one of yes, true, on, 1, no, false, off, 0")


def parse_cores(text: str) -> tuple[int, ...]:
    """Numbers of cores as Linux writes them, such as ``0-3,8``, in ascending order; ``ValueError`` for other texts."""
    cores: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise ValueError("expected numbers and ranges of cores, such as 0-3,8")
        cores.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cores))


def render_cores(cores: Iterable[int]) -> str:
    """The inverse of :func:`parse_cores`."""
    ranges: list[list[int]] = []
    for core in sorted(set(cores)):
        if ranges and core == ranges[-1][-1] + 1:
            ranges[-1][1:] = [core]
        else:
            ranges.append([core])
    return ",".join("-".join(map(str, ends)) for ends in ranges)


def _integer(name: str, default: int | None, doc: str) -> Variable[Any]:
    return Variable(name, parse_integer, str, default, doc)


def _flag(name: str, doc: str, default: bool = False, texts: tuple[str, str] = ("false", "true")) -> Variable[bool]:
    """A switch; ``texts`` are how off and on are written, which scripts that read them themselves may rely on."""
    return Variable(name, parse_flag, lambda value: texts[bool(value)], default, doc)


_AS_PYTHON_WRITES = ("False", "True")


def _text(name: str, default: str | None, doc: str) -> Variable[Any]:
    return Variable(name, str, str, default, doc)


def _parse_place(text: str) -> tuple[int, int]:
    descriptor, colon, slot = text.partition(":")
    if not (colon and descriptor.isdecimal() and slot.isdecimal()):
        raise ValueError("expected two numbers with a colon between, such as 7:0")
    return int(descriptor), int(slot)


def _parse_pipe(text: str) -> tuple[int, int, int]:
    parts = text.split(":")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise ValueError("expected three numbers with colons between, such as 7:4711:0")
    descriptor, pipe, worker = map(int, parts)
    return descriptor, pipe, worker


def _parse_fp8_backend(text: str) -> str:
    if text.upper() not in ("NO", "AO", "TE", "MSAMP"):
        raise ValueError("expected one of NO, AO, TE, MSAMP")
    return text.upper()


ELASTIC_RULES = ("linear", "sqrt", "none")


def _parse_elastic_lr(text: str) -> str:
    if text not in ELASTIC_RULES:
        raise ValueError(f"expected one of {', '.join(ELASTIC_RULES)}")
    return text


RANK = _integer("RANK", None, "rank of this process over all hosts, from 0")
WORLD_SIZE = _integer("WORLD_SIZE", None, "number of processes over all hosts")
LOCAL_RANK = _integer("LOCAL_RANK", None, "rank of this process on its host, from 0")
LOCAL_WORLD_SIZE = _integer("LOCAL_WORLD_SIZE", None, "number of processes on this host")
LOCAL_SIZE = _integer("LOCAL_SIZE", None, "the same from DeepSpeed's launcher, which does not set LOCAL_WORLD_SIZE")
MASTER_ADDR = _text("MASTER_ADDR", None, "host name or address of rank 0")
MASTER_PORT = _integer("MASTER_PORT", None, "TCP port of rank 0's store")
RENDEZVOUS_FD = _integer(
    "ACCELERATE_CPP_RENDEZVOUS_FD",
    None,
    "inherited descriptor of the memory file through which one host's workers meet",
)
BOARD: Variable[tuple[int, int] | None] = Variable(
    "ACCELERATE_CPP_BOARD",
    _parse_place,
    lambda place: ":".join(map(str, place or ())),
    None,
    "inherited descriptor of the memory file on which workers say how far they are, and this worker's slot in it",
)
JOINING: Variable[tuple[int, int, int] | None] = Variable(
    "ACCELERATE_CPP_JOINING",
    _parse_pipe,
    lambda place: ":".join(map(str, place or ())),
    None,
    "inherited descriptor of the pipe on which workers say that they join a group, its inode, and this worker's number",
)
ERROR_REPORT: Variable[tuple[int, int] | None] = Variable(
    "ACCELERATE_CPP_ERROR_REPORT",
    _parse_place,
    lambda place: ":".join(map(str, place or ())),
    None,
    "inherited descriptor of the memory file for the exception that ends this worker, and the pid of its launcher",
)
LIVE_VIEW = _flag("ACCELERATE_CPP_LIVE_VIEW", "show in the cell how far the workers of notebook_launcher are", True)
RESTART_COUNT = _integer(
    "TORCHELASTIC_RESTART_COUNT", None, "how often the workers were started again; named as torch's"
)
MAX_RESTARTS = _integer("TORCHELASTIC_MAX_RESTARTS", None, "how often they may be")
USE_AGENT_STORE = _flag(
    "TORCHELASTIC_USE_AGENT_STORE", "torch's agent has the store of rank 0, and keeps it through restarts"
)
FULL_WORLD_SIZE = _integer(
    "ACCELERATE_CPP_FULL_WORLD_SIZE",
    None,
    "number of processes that the program's settings are meant for, in a run that may go on with fewer",
)
RUN_SECRET = _text(
    "ACCELERATE_CPP_RUN_SECRET", "", "what the launchers of an elastic run have to know to take part in it"
)
ELASTIC_LR = Variable(
    "ACCELERATE_CPP_ELASTIC_LR",
    _parse_elastic_lr,
    str,
    "linear",
    "how the learning rate follows the samples of a step that whole micro-batches cannot keep: linear, sqrt or none",
)
USE_CPU = _flag("ACCELERATE_USE_CPU", "train on the CPU even when an accelerator is present", texts=_AS_PYTHON_WRITES)
TORCH_DEVICE = _text("ACCELERATE_TORCH_DEVICE", None, "the device to use, for example cuda:1 or cpu")
MIXED_PRECISION = _text("ACCELERATE_MIXED_PRECISION", None, "no, fp16, bf16 or fp8; an argument in code wins over it")
GRADIENT_ACCUMULATION_STEPS = _integer(
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None, "micro-batches per optimizer step; wins over the argument in code"
)
FP8_BACKEND = Variable(
    "ACCELERATE_FP8_BACKEND",
    _parse_fp8_backend,
    str,
    "NO",
    "the library of fp8 training without a recipe: AO (torchao), TE (TransformerEngine), MSAMP (MS-AMP), NO (any)",
)
FP8_PAD_INNER_DIM = _flag("ACCELERATE_FP8_PAD_INNER_DIM", "torchao: pad matrices to multiples of 16", default=True)
USE_FSDP = _flag("ACCELERATE_USE_FSDP", "shard parameters, gradients and optimizer states (FSDP)")
USE_DEEPSPEED = _flag("ACCELERATE_USE_DEEPSPEED", "train through DeepSpeed")
USE_MEGATRON_LM = _flag("ACCELERATE_USE_MEGATRON_LM", "split models as the variables of Megatron-LM's plugin say")
DS_ACCELERATOR = _text("DS_ACCELERATOR", None, "DeepSpeed's; the kind of device that it computes on")
USE_PARALLELISM_CONFIG = _flag("ACCELERATE_USE_PARALLELISM_CONFIG", "read the sizes of a mesh from the environment")
FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER = _flag(
    "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", "torchao: gather sharded weights in fp8", default=True
)
FP8_USE_AUTOCAST_DURING_EVAL = _flag(
    "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL", "TransformerEngine: compute in fp8 in evaluation mode, too"
)
FP8_MARGIN = _integer("ACCELERATE_FP8_MARGIN", 0, "TransformerEngine: powers of two kept free above the largest value")
FP8_INTERVAL = _integer("ACCELERATE_FP8_INTERVAL", 1, "TransformerEngine: steps between two updates of the scales")
FP8_FORMAT = _text("ACCELERATE_FP8_FORMAT", "HYBRID", "TransformerEngine: HYBRID, E4M3 or E5M2")
FP8_AMAX_HISTORY_LEN = _integer(
    "ACCELERATE_FP8_AMAX_HISTORY_LEN", 1024, "TransformerEngine: steps whose largest values the scales are made from"
)
FP8_AMAX_COMPUTE_ALGO = _text(
    "ACCELERATE_FP8_AMAX_COMPUTE_ALGO", "most_recent", "TransformerEngine: max or most_recent of that history"
)
FP8_OVERRIDE_FPROP = _flag("ACCELERATE_FP8_OVERRIDE_FPROP", "TransformerEngine: forward in higher precision")
FP8_OVERRIDE_DGRAD = _flag(
    "ACCELERATE_FP8_OVERRIDE_DGRAD", "TransformerEngine: gradients of activations in higher precision"
)
FP8_OVERRIDE_WGRAD = _flag(
    "ACCELERATE_FP8_OVERRIDE_WGRAD", "TransformerEngine: gradients of weights in higher precision"
)
FP8_USE_MXFP8_BLOCK_SCALING = _flag(
    "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING", "TransformerEngine: a scale for each block of 32 values"
)
FP8_OPT_LEVEL = _text("ACCELERATE_FP8_OPT_LEVEL", "O2", "MS-AMP: O1 or O2")
DEBUG_MODE = _flag("ACCELERATE_DEBUG_MODE", "check the shapes of collectives before running them")
DYNAMO_BACKEND = _text("ACCELERATE_DYNAMO_BACKEND", None, "torch.compile backend for prepared models; no means off")
DYNAMO_MODE = _text("ACCELERATE_DYNAMO_MODE", None, "mode of torch.compile: default, reduce-overhead or max-autotune")
DYNAMO_USE_FULLGRAPH = _flag(
    "ACCELERATE_DYNAMO_USE_FULLGRAPH", "torch.compile refuses breaks of the graph", texts=_AS_PYTHON_WRITES
)
DYNAMO_USE_DYNAMIC = _flag(
    "ACCELERATE_DYNAMO_USE_DYNAMIC", "torch.compile for shapes that change", texts=_AS_PYTHON_WRITES
)
DYNAMO_USE_REGIONAL_COMPILATION = _flag(
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "torch.compile block by block", texts=_AS_PYTHON_WRITES
)
SLOW_WAIT_SECONDS = Variable(
    "ACCELERATE_CPP_SLOW_WAIT_SECONDS",
    _parse_seconds,
    lambda seconds: f"{seconds:g}",
    30.0,
    "after how many seconds a rank that waits for others logs a warning that says for whom; 0 means never",
)
CUDA_KERNELS = _flag(
    "ACCELERATE_CPP_CUDA_KERNELS",
    "let kernels of this package, instead of torch's operations, average and measure gradients on CUDA devices; "
    "experimental: they have run on one GPU",
)
NCCL = _flag(
    "ACCELERATE_CPP_NCCL",
    "let this package, instead of torch's process group, ask NCCL to sum gradients that its reducer averages on CUDA "
    "devices; experimental: it has run on one GPU",
)
OFFLOAD_WINDOW = _text(
    "ACCELERATE_CPP_OFFLOAD_WINDOW",
    None,
    "how many bytes of offloaded weights are fetched before the layers that need them run, such as 512MB; 0 means none",
)
ALIAS = _flag(
    "ACCELERATE_CPP_ALIAS",
    "programs that import accelerate get this package, whether the original is installed or not",
    texts=("0", "1"),
)
HF_HOME = _text("HF_HOME", None, "folder of Hugging Face's files, the configuration of launches among them")
XDG_CACHE_HOME = _text("XDG_CACHE_HOME", "~/.cache", "folder of caches, in which huggingface/ is unless HF_HOME is set")
FORK_LAUNCHED = _flag("FORK_LAUNCHED", "set in processes that notebook_launcher started")
OMP_NUM_THREADS = _integer("OMP_NUM_THREADS", None, "intra-operator threads of each process")
KMP_AFFINITY = _text("KMP_AFFINITY", None, "how Intel's OpenMP binds the threads of each process to cores")
KMP_BLOCKTIME = _integer("KMP_BLOCKTIME", None, "milliseconds that its threads wait for work before they sleep")
CPU_AFFINITY = _flag("ACCELERATE_CPU_AFFINITY", "pin each process of a host to cores of its own", texts=("0", "1"))
CORES: Variable[tuple[int, ...]] = Variable(
    "ACCELERATE_CPP_CORES",
    parse_cores,
    render_cores,
    (),
    "the cores that the pinned processes of this host share out among them, for example 0-3,8",
)

INIT_INCLUDE_BUFFERS = _flag(
    "ACCELERATE_INIT_INCLUDE_BUFFERS", "init_empty_weights leaves out the values of buffers, too"
)
BYPASS_DEVICE_MAP = _flag(
    "ACCELERATE_BYPASS_DEVICE_MAP", "prepare models on several processes though a device_map spread them over devices"
)
NPROC = _integer("NPROC", 1, "processes of each machine, where a program starts them itself")
NODE_RANK = _integer("NODE_RANK", 0, "number of this machine there, from 0")
DEBUG_RDV_FILE = _text("ACCELERATE_DEBUG_RDV_FILE", None, "file through which processes meet that debug a launch")
ENABLE_RICH = _flag("ACCELERATE_ENABLE_RICH", "show tracebacks through rich where it is installed")
DOWNCAST_BF16 = _flag("ACCELERATE_DOWNCAST_BF16", "with bf16 on TPUs, store floats in bf16, and doubles as floats")
IN_TPU_POD = _flag("ACCELERATE_IN_TPU_POD", "this process is one of a pod of TPUs", texts=("0", "1"))
XLA_DOWNCAST_BF16 = _flag("XLA_DOWNCAST_BF16", "what torch_xla reads for the same", texts=("0", "1"))
USE_TORCH_XLA = _flag("USE_TORCH_XLA", "let an installed torch_xla count as one", default=True)
NVML_BASED_CUDA_CHECK = _flag(
    "PYTORCH_NVML_BASED_CUDA_CHECK", "torch looks for GPUs without initialising the driver", texts=("0", "1")
)
MPS_FALLBACK = _flag(
    "PYTORCH_ENABLE_MPS_FALLBACK", "torch computes on the CPU what the GPU of a Mac cannot", texts=("0", "1")
)
MALLOC_TRIM_THRESHOLD = _text("MALLOC_TRIM_THRESHOLD_", None, "glibc's; if set, freed memory is kept as it says")
MALLOC_MMAP_THRESHOLD = _text("MALLOC_MMAP_THRESHOLD_", None, "glibc's; if set, freed memory is kept as it says")
GLIBC_TUNABLES = _text("GLIBC_TUNABLES", None, "glibc's; if it has one of these thresholds, it is followed")
CXX = _text("CXX", None, "the C++ compiler of `accelerate-cpp rebuild`; default: c++, g++ or clang++")
RUN_SLOW = _flag("RUN_SLOW", "run the tests that accelerate_cpp.test_utils.slow marks")
XDIST_WORKER = _text("PYTEST_XDIST_WORKER", None, "name of this process among those of pytest-xdist, such as gw0")

VARIABLES: tuple[Variable[Any], ...] = tuple(row for row in list(globals().values()) if isinstance(row, Variable))


def render(values: Mapping[Variable[Any], Any]) -> dict[str, str]:
    """The environment that hands ``values`` to a worker; a value of ``None`` leaves its variable out."""
    return {row.name: row.render(value) for row, value in values.items() if value is not None}


def environment_here() -> Mapping[str, str]:
    """The variables of this process, as they are."""
    return os.environ


@contextmanager
def replaced_environment(values: Mapping[str, str], clear: bool = False) -> Iterator[None]:
    """Inside this block, ``os.environ`` has ``values`` besides, or instead of, what it had; then it is as it was
    before.

    With ``clear``, everything else comes back; without, only ``values`` do, and other changes stay.
    """
    names = list(os.environ) if clear else list(values)
    before = {name: os.environ[name] for name in names if name in os.environ}
    try:
        if clear:
            os.environ.clear()
        os.environ.update(values)
        yield
    finally:
        for name in list(os.environ) if clear else names:
            os.environ.pop(name, None)
        os.environ.update(before)


def export(values: Mapping[Variable[Any], Any]) -> None:
    """Puts ``values`` into the environment of this process, and of those that it starts; ``None`` leaves one alone."""
    os.environ.update(render(values))


def withdraw(*variables: Variable[Any]) -> None:
    """Removes ``variables`` from the environment of this process."""
    for variable in variables:
        os.environ.pop(variable.name, None)


@contextmanager
def restored_environment(prefix: str) -> Iterator[None]:
    """Afterwards the variables of ``os.environ`` whose names begin with ``prefix`` are as they were before."""

    def found() -> dict[str, str]:
        return {name: text for name, text in os.environ.items() if name.startswith(prefix)}

    before = found()
    try:
        yield
    finally:
        for name in found().keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def raw(name: str) -> str | None:
    """The text of any variable, for helpers that look up what the caller names."""
    return os.environ.get(name)
