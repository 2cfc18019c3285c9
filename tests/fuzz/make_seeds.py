# ruff: noqa: E501  (texts of files, a line each)
"""Writes the inputs that fuzzing starts from: sound ones of each format, and hostile ones that people have thought of.

``python tests/fuzz/make_seeds.py`` writes them into ``tests/fuzz/corpus``; what fuzzing has found lies there, too.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

CORPUS = Path(__file__).resolve().parent / "corpus"


def _header(header: Any, length: int | None = None, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def calling(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls ``module.name(argument)`` when it is read without restrictions."""
    return f"c{module}\n{name}\n(V{argument}\ntR.".encode()


def doubled(times: int) -> bytes:
    """The opcodes of a dict whose key is a tuple of two references to a tuple of two references, and so on."""
    pairs = b"".join(b"h%ch%c\x86q%c" % (one - 1, one - 1, one) for one in range(1, times + 1))
    return b"(K\0\x85q\0" + pairs + b"}h%cK\1st" % times


def shards_file() -> bytes:
    """The file ``__0_0.distcp`` to which :func:`shards_index` belongs."""
    torch.save(torch.ones(4), file := io.BytesIO())
    return file.getvalue()


def shards_index(
    path: str = "__0_0.distcp", size: tuple[int, ...] = (4,), steps: tuple[Any, ...] = ("model", "a")
) -> bytes:
    """The index of a state in shards: where the values are, how large a tensor is, and its place in the state."""
    name = ".".join(map(str, steps))
    return pickle.dumps(
        Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(torch.float32),
                    torch.Size(size),
                    [ChunkStorageMetadata(torch.Size([0] * len(size)), torch.Size(size))],
                ),
            },
            {name: steps},
            {MetadataIndex(name, torch.Size([0] * len(size))): _StorageInfo(path, 0, len(shards_file()))},
        )
    )


def seeds() -> Iterator[tuple[str, str, bytes]]:
    """Target, name and bytes of each."""
    one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    yield (
        "safetensors",
        "sound",
        save({"a": torch.ones(4), "b": torch.zeros(2, 2, dtype=torch.bfloat16)}, {"format": "pt"}),
    )
    yield "safetensors", "length-2-to-63", _header({"a": one}, 1 << 63, b"1234")
    yield "safetensors", "length-2-to-40", _header({"a": one}, 1 << 40, b"1234")
    yield "safetensors", "overflowing-shape", _header({"a": {**one, "shape": [1 << 62, 1 << 62]}}, data=b"1234")
    yield "safetensors", "overlapping", _header({"a": one, "b": one}, data=b"1234")
    yield "safetensors", "backwards", _header({"a": {**one, "data_offsets": [4, 0]}}, data=b"1234")
    yield "safetensors", "deep", _header(b"[" * 5000)
    yield "safetensors", "other-format", _header({"__metadata__": {"format": "flax"}, "a": one}, data=b"1234")
    yield "safetensors", "metadata-of-other-types", _header({"__metadata__": {"format": 1}, "a": one}, data=b"1234")
    yield "safetensors", "not-utf-8", _header(b'{"\xff": 1}')
    yield "safetensors", "empty", b""
    for name, file in {
        "sound": "in.safetensors",
        "up": "../outside/a.safetensors",
        "up-and-down": "../folder/../outside/a.safetensors",
        "absolute": "/etc/passwd",
        "link": "link.safetensors",
        "folder-link": "link/a.safetensors",
        "pickle-through-link": "link/a.bin",
        "pipe": "pipe.safetensors",
        "zero-byte": "in\0.safetensors",
        "device": "/dev/zero",
        "folder": ".",
        "half-character": "\ud800",
        "empty-name": "",
    }.items():
        yield "weights_index", name, json.dumps({"weight_map": {"a": file, "b": file}}).encode()
        entry = {"safetensors_file": file, "weight_name": "a", "dtype": "float32"}
        yield "offload_index", name, json.dumps({"a": entry}).encode()
        yield "shards_index", name, shards_index(file)
    yield "weights_index", "lists", b'{"weight_map": {"a": ["in.safetensors"]}}'
    yield "weights_index", "numbers", b'{"weight_map": {"a": 1}}'
    yield "weights_index", "a-list", b"[1]"
    yield "weights_index", "deep", b"[" * 5000
    yield "offload_index", "sound-dat", b'{"a": {"dtype": "float32", "shape": [4]}}'
    yield "offload_index", "link-dat", b'{"link": {"dtype": "uint8", "shape": [1460]}}'
    yield "offload_index", "up-dat", b'{"../outside/a": {"dtype": "uint8", "shape": [4]}}'
    yield "offload_index", "huge", b'{"a": {"dtype": "float32", "shape": [9223372036854775807, 9223372036854775807]}}'
    yield "offload_index", "beyond-64-bits", b'{"a": {"dtype": "float32", "shape": [99999999999999999999]}}'
    yield "offload_index", "negative", b'{"a": {"dtype": "float32", "shape": [-4]}}'
    yield "offload_index", "no-shape", b'{"a": {"dtype": "float32"}}'
    yield "offload_index", "no-dtype", b'{"a": {"dtype": "load", "shape": [4]}}'
    yield "offload_index", "half-character-dat", b'{"\\ud800": {"dtype": "float32", "shape": [4]}}'
    yield "offload_index", "long-dat", json.dumps({"a" * 300: {"dtype": "float32", "shape": [4]}}).encode()
    yield "offload_index", "long-file", json.dumps({"a": {"safetensors_file": "a" * 300}}).encode()
    yield "offload_index", "entries-of-other-types", b'{"a": 1, "b": [], "c": "x"}'
    buffer = io.BytesIO()
    torch.save({"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"params": [0]}]}, buffer)
    yield "pickle", "sound", b"f" + buffer.getvalue()
    torch.save({"a": torch.ones(2)}, buffer := io.BytesIO(), _use_new_zipfile_serialization=False)
    yield "pickle", "sound-old", b"f" + buffer.getvalue()
    yield "pickle", "sound-inner", b"a" + pickle.dumps({"a": [1, 2.0, "x"]}, 2)
    for kind, begin in (("inner", b"a"), ("outer", b"f")):
        for module, name in (("fuzz_targets", "call"), ("os", "system"), ("builtins", "eval"), ("torch", "load")):
            yield "pickle", f"{kind}-calls-{module}-{name}", begin + b"\x80\x02" + calling(module, name, "true")
    yield "pickle", "inner-deep", b"a\x80\x02" + b"]" * 3000 + b"a" * 2999 + b"."
    yield "pickle", "inner-memo", b"a\x80\x02]r\xff\xff\xff\x7f."
    yield "pickle", "inner-doubled", b"a\x80\x02" + doubled(50) + b"."
    yield "pickle", "inner-bytearray", b"a\x80\x02](" + b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R" * 50 + b"e."
    yield "pickle", "inner-endless", b"a\x80\x02]q\0h\0a."
    yield "pickle", "cut", b"f" + buffer.getvalue()[:100]
    yield "shards_index", "sound-empty-lists", shards_index(steps=("model", "a", 3))
    yield "shards_index", "state-is-a-list", shards_index(steps=("model", 3))
    yield "shards_index", "no-place", shards_index(steps=("optimizer",))
    yield "shards_index", "state-is-a-value", shards_index(steps=("optimizer", "state"))
    yield "shards_index", "groups-are-values", shards_index(steps=("optimizer", "param_groups", 1))
    yield "shards_index", "many-lists", shards_index(steps=("model", "a", *[99999] * 200))
    yield "shards_index", "endless-list", shards_index(steps=("model", 1 << 40))
    yield "shards_index", "negative-list", shards_index(steps=("model", "a", -1, 2))
    yield "shards_index", "negative-tensor", shards_index(size=(-4,))
    yield "shards_index", "huge-tensor", shards_index(size=(1 << 40, 1 << 20))
    yield "shards_index", "overflowing-tensor", shards_index(size=(1 << 62, 1 << 62))
    yield "shards_index", "memo", b"\x80\x04]r\xff\xff\xff\x7f."
    yield "shards_index", "doubled", b"\x80\x02" + doubled(50) + b"."
    changed = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\nN}X\x08\0\0\0__hash__Ns\x86b."
    yield "shards_index", "changes-a-class", b"\x80\x02" + changed
    yield "shards_index", "calls", b"\x80\x02" + calling("fuzz_targets", "call", "x")
    yield "shards_index", "calls-torch-load", b"\x80\x02" + calling("torch", "load", "/etc/passwd")
    yield "shards_index", "a-list", pickle.dumps([1, 2])
    sound = {"format": 1, "iteration": 1, "world_size": 2, "files": {"a.bin": {"bytes": 3, "xxh3": 1}}, "cursors": [{}]}
    yield "manifest", "sound", json.dumps(sound).encode()
    for name, change in {
        "up": {"files": {"../outside/a.bin": {"bytes": 1, "xxh3": 1}}},
        "link": {"files": {"link/a.bin": {"bytes": 1, "xxh3": 1}}},
        "absolute": {"files": {"/etc/passwd": {"bytes": 1, "xxh3": 1}}},
        "checksum-is-text": {"files": {"a.bin": {"bytes": 3, "xxh3": "1"}}},
        "iteration-is-text": {"iteration": "1"},
        "world-size-is-none": {"world_size": None},
        "cursors-are-numbers": {"cursors": [1, 2]},
        "other-version": {"format": [1]},
        "zero-byte": {"files": {"a\0": {"bytes": 3, "xxh3": 1}}},
        "more-fields": {"files": {"a.bin": {"bytes": 3, "xxh3": 1, "run": "x"}}},
        "truth": {"iteration": True},
    }.items():
        yield "manifest", name, json.dumps({**sound, **change}).encode()
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
    )
    for name, text in {
        "sound": "distributed_type: MULTI_CPU\nnum_processes: 2\nmixed_precision: bf16\n",
        "fsdp": "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: true\n",
        "deepspeed": "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2, deepspeed_hostfile: /nowhere}\n",
        "fp8": "distributed_type: 'NO'\nmixed_precision: fp8\nfp8_config: {backend: TE, override_linear_precision: 3}\n",
        "bomb": bomb + "distributed_type: *a11\nnum_processes: *a11\n",
        "cycle": "distributed_type: 'NO'\nfsdp_config: &a {a: *a}\n",
        "merge": "a: &a {b: 1}\nc: &c {<<: [*a, *a, *a]}\n<<: [*c, *c, *c]\ndistributed_type: 'NO'\n",
        "int-tag": "distributed_type: 'NO'\nnum_processes: !!int ''\n",
        "bool-tag": "distributed_type: 'NO'\nuse_cpu: !!bool x\n",
        "time-tag": "distributed_type: 'NO'\ngpu_ids: !!timestamp x\n",
        "time": "distributed_type: 'NO'\ngpu_ids: 2001-01-01\nmain_process_ip: 2001-99-99\n",
        "object": "!!python/object/apply:fuzz_targets.call [x]",
        "zero-byte": 'distributed_type: "NO"\nmain_process_ip: "a\\0b"\n',
        "keys-of-other-types": "1: 2\n[a, b]: c\n? {}\n",
        "section-keys": "distributed_type: FSDP\nfsdp_config: {1: 2, null: 3}\n",
        "number": "distributed_type: 'NO'\nnum_processes: 9999999999999999999999\nmain_process_port: 1e400\n",
        "tpu": "distributed_type: XLA\ntpu_env: [1, {a: b}]\ncommands: x\n",
        "mesh": "distributed_type: FSDP\nparallelism_config: {parallelism_config_dp_shard_size: -1, parallelism_config_cp_size: x}\n",
        "rank": "distributed_type: MULTI_CPU\nnum_machines: 3\nmachine_rank: -7\nnum_processes: 3\nmain_process_port: -1\n",
        "deep": "[" * 3000,
    }.items():
        yield "config", name, b"y" + text.encode()
    for name, text in {
        "json": '{"distributed_type": "MULTI_CPU", "num_processes": 2}',
        "json-deep": '{"a":' * 3000,
        "json-half-character": '{"distributed_type": "NO", "main_process_ip": "\\ud800"}',
        "json-infinity": '{"distributed_type": "NO", "num_processes": Infinity, "machine_rank": NaN}',
        "json-digits": '{"num_processes": ' + "9" * 5000 + "}",
        "json-answers": '{"distributed_type": "MULTI_CPU", "fsdp_config": {"a": [[1]]}, "num_processes": [1, 2]}',
    }.items():
        yield "config", name, b"j" + text.encode()
    for name, text in {
        "sound": "a slots=2\nb slots=2\n",
        "plain": "a\nb # comment\n\n",
        "open-mpi": "a:4\nb:4\n",
        "option": "-oProxyCommand=touch${IFS}/tmp/x\n",
        "huge": "a slots=" + "9" * 5000 + "\n",
        "twice": "a\na\n",
        "shell": "$(touch x) slots=1\n;ls\n",
        "zero-byte": "a\0b\n",
    }.items():
        yield "hostfile", name, text.encode()
    yield "hostfile", "not-utf-8", b"\xff\xfe\n"
    for name, text in {
        "open-mpi": "OMPI_COMM_WORLD_SIZE=2\nOMPI_COMM_WORLD_RANK=1\nOMPI_COMM_WORLD_LOCAL_SIZE=1\nOMPI_COMM_WORLD_LOCAL_RANK=0",
        "hydra": "PMI_SIZE=2\nPMI_RANK=0\nMPI_LOCALNRANKS=2\nMPI_LOCALRANKID=0",
        "slurm": "SLURM_STEP_NUM_TASKS=4\nSLURM_PROCID=1\nSLURM_STEP_TASKS_PER_NODE=2(x2)\nSLURM_NODEID=0\nSLURM_LOCALID=1\n"
        "SLURM_JOB_ID=1\nSLURM_STEP_NODELIST=gpu[1-2,5]\nSLURM_STEP_NUM_NODES=2",
        "slurm-many": "SLURM_STEP_NUM_TASKS=4\nSLURM_PROCID=1\nSLURM_STEP_TASKS_PER_NODE=2(x999999999999)\nSLURM_NODEID=0\n"
        "SLURM_LOCALID=1\nSLURM_JOB_ID=1\nSLURM_STEP_NODELIST=a\nSLURM_STEP_NUM_NODES=2",
        "slurm-list": "SLURM_STEP_NUM_TASKS=4\nSLURM_PROCID=1\nSLURM_STEP_TASKS_PER_NODE=2(x2)\nSLURM_STEP_NODELIST=[[,\nSLURM_NODEID=0\n"
        "SLURM_LOCALID=1\nSLURM_JOB_ID=1",
        "kubernetes": "WORLD_SIZE=2\nRANK=1\nMASTER_ADDR=a\nMASTER_PORT=1\nPET_NNODES=2\nKUBERNETES_SERVICE_HOST=x\nJOB_COMPLETION_INDEX=1",
        "digits": "OMPI_COMM_WORLD_SIZE=" + "9" * 5000,
        "other-digits": "OMPI_COMM_WORLD_SIZE=²\nOMPI_COMM_WORLD_RANK=٣",
    }.items():
        yield "schedulers", name, text.encode()
    for name, value in {
        "sound": {"zero_optimization": {"stage": 2}, "train_batch_size": "auto"},
        "stage-is-text": {"zero_optimization": {"stage": "x"}},
        "stage-is-a-list": {"zero_optimization": {"stage": [3], "offload_param": 1}},
        "section-is-a-number": {"zero_optimization": 1, "fp16": []},
        "accumulation": {"zero_optimization": {}, "gradient_accumulation_steps": {"a": 1}, "gradient_clipping": []},
        "precision": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": "yes"}, "fp16": True},
        "offload": {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": ["nvme"]}, "offload_param": None}
        },
    }.items():
        yield "deepspeed", name, json.dumps(value).encode()
    yield "deepspeed", "deep", b'{"a":' * 3000
    yield "deepspeed", "not-utf-8", b"\xff"
    slot = struct.Struct("=QdQQqQQq").pack
    ring = struct.pack("=32q", *range(32))
    yield "board", "sound", slot(20, 0.5, 1, 1, 0, 1, 2, 3) + ring + slot(18, 0.25, 1, 1, 0, 1, 2, 3) + ring
    yield "board", "largest", b"\xff" * 640
    yield "board", "infinite-loss", slot(1, float("inf"), 0, 0, 0, 0, 0, 0) + ring
    yield "board", "times-far-apart", slot(9, float("-inf"), 1, 1, -(1 << 63), 1 << 63, 1, (1 << 63) - 1) + ring[::-1]
    message = struct.Struct("=IB").pack
    yield "attendance", "sound", message(0, 0) + message(1, 0) + message(0, 1) + message(1, 1)
    yield "attendance", "unknown-worker", message(7, 0) + message(0, 0)
    yield "attendance", "odd-length", message(0, 0) + b"\1"
    yield "attendance", "unknown-event", message(1, 200)
    sound_report = {"summary": "ValueError: x", "traceback": "Traceback\nValueError: x", "blames": None}
    yield from _said_by_launchers()
    yield "error_report", "sound", json.dumps(sound_report).encode()
    for name, value in {
        "a-list": [],
        "a-number": 1,
        "no-blames": {"summary": "x"},
        "summary-is-a-number": {**sound_report, "summary": 1},
        "blames-is-a-number": {**sound_report, "blames": 3},
        "blames-texts": {**sound_report, "blames": ["a", None]},
        "more": {**sound_report, "more": 1},
    }.items():
        yield "error_report", name, json.dumps(value).encode()
    yield "error_report", "deep", b"[" * 5000
    yield (
        "error_report",
        "traceback",
        b"Traceback (most recent call last):\n  File x\naccelerate_cpp.errors.PeerLost: rank 1 has ended\n",
    )
    yield "parcel", "sound", struct.pack("=2Q", 1, 4).ljust(64, b"\0") + b"\x80\x04N."
    yield "parcel", "two", struct.pack("=3Q", 2, 4, 3).ljust(64, b"\0") + b"\x80\x04N.".ljust(64, b"\0") + b"abc"
    yield "parcel", "endless", struct.pack("=2Q", 1 << 62, 1 << 62)
    yield "parcel", "empty", b""
    greeting = b"\0" * 16 + struct.pack("=i", 1)
    yield "cpp_handshake", "greeting", b"\0" + bytes([len(greeting)]) + greeting
    yield "cpp_handshake", "silent", b"\0" + b"\0" * 100
    yield "cpp_handshake", "short", b"\0\3abc\1x"
    yield "cpp_handshake", "address", b"\1" + b"t" * 16 + b"accelerate_cpp-0123456789abcdef"
    yield "cpp_handshake", "long-address", b"\1" + b"t" * 16 + b"x" * 300
    yield "cpp_handshake", "longest-address", b"\1" + b"t" * 16 + b"x" * 107
    yield "cpp_handshake", "short-address", b"\1" + b"t" * 16
    packet = struct.Struct("=II").pack
    for name, messages in {
        "sound": [(1, packet(1, 0)), (0, packet(2, 0)), (0, packet(3, 0))],
        "two-descriptors": [(2, packet(1, 0))],
        "unwanted-descriptor": [(1, packet(2, 0)), (4, packet(3, 1))],
        "none": [(0, packet(1, 0))],
        "short": [(0, b"\1"), (1, b"\1\0\0")],
        "long": [(1, packet(1, 0) + b"xyz")],
        "unknown-kind": [(1, packet(9, 0))],
        "twice": [(1, packet(1, 0)), (1, packet(1, 0)), (1, packet(1, 1)), (0, packet(2, 0))],
        "many": [(1, packet(1, number)) for number in range(8)],
    }.items():
        yield "cpp_channel", name, b"".join(bytes([len(text), count]) + text for count, text in messages)
    control = bytearray(8192)
    control[16:24] = struct.pack("=Q", 3)
    control[56:60] = struct.pack("=I", 2)
    yield "cpp_shared_memory", "calm", b"\0"
    yield "cpp_shared_memory", "announced", b"\0" + bytes(control) + struct.pack("=QQIII", 1, 0, 0, 0, 0)
    yield "cpp_shared_memory", "largest", b"\1" + b"\xff" * 8192 + b"\xff" * 8192
    yield "cpp_shared_memory", "largest-outbox", b"\0" + bytes(control) + b"\xff" * 8192
    yield "cpp_shared_memory", "text-without-end", b"\0" + bytes(control[:128]) + b"A" * 4000
    yield "cpp_shared_memory", "short-control", b"\7"
    yield "cpp_shared_memory", "short-outbox", b"\6" + bytes(control)
    control[8:12] = struct.pack("=I", 1)
    yield "cpp_shared_memory", "failed", b"\0" + bytes(control)
    # Damage to a sound control block, whose operation 1 begins at 256 and has its offset at 120.
    for number, name in enumerate(("all-reduce", "broadcast", "barrier", "all-to-all", "messages")):
        yield "cpp_shared_memory", f"sound-{name}", bytes([8 + number])
        yield "cpp_shared_memory", f"sound-{name}-in-arena", bytes([24 + number])
    for number, name in ((0, "all-reduce"), (1, "broadcast"), (3, "all-to-all")):
        for place, offset in {"at-the-end": (16 << 20) - 8, "odd": 1, "beyond": (1 << 64) - 8}.items():
            damage = struct.pack("=Q", offset).rjust(256 + 128, b"\0")
            yield "cpp_shared_memory", f"{name}-{place}", bytes([24 + number]) + damage
    given = struct.pack("=4Q", 1 << 20, 0, 0, 0).rjust(4096 + 64, b"\0")
    for number, name in ((1, "broadcast"), (3, "all-to-all")):
        yield "cpp_shared_memory", f"{name}-of-more", bytes([8 + number]) + given
        yield "cpp_shared_memory", f"{name}-of-more-in-arena", bytes([24 + number]) + given
    pages = bytearray(8192 + 24)
    pages[8192:] = struct.pack("=QQII", 1, 0, 0, 2)
    yield "cpp_shared_memory", "endless-pages", b"\x0c" + bytes(pages)


def _said_by_launchers() -> Iterator[tuple[str, str, bytes]]:
    """What is said in an elastic run, after a letter for who hears it."""

    def lines(*messages: Any) -> bytes:
        return b"".join(json.dumps(message).encode() + b"\n" for message in messages)

    hello = {"name": "a", "order": 0, "most": 1, "num_processes": 1}
    ended = {"say": "ended", "round": 1, "status": 0, "sentence": "", "is_cause": True, "has_saved": False}
    start = {"do": "start", "round": 1, "rank": 0, "count": 1, "address": "a", "port": 1}
    offered = {"say": "port", "round": 1, "port": 29500}
    for name, data in {
        "stranger": b"s" + lines({"say": "challenge", "challenge": "c"}, hello),
        "older-version": b"s" + lines({"say": "hello"}),
        "browser": b"sGET / HTTP/1.1\r\n\r\n",
        "long-line": b"s" + b"x" * 60_000,
        "deep": b"s" + b"[" * 5000 + b"\n",
        "hello": b"h" + lines(hello, {"say": "alive"}, offered, ended),
        "run": b"p" + lines(offered, {"say": "alive"}, ended),
        "failure": b"p" + lines(offered, ended | {"status": 3, "sentence": "rank 0 failed"}),
        "saved": b"p" + lines(offered, {"say": "stopped", "round": 1, "status": 75, "has_saved": True}),
        "leaves": b"p"
        + lines(offered, {"say": "leaves", "has_saved": True}, {"say": "stopped", "round": 1, "status": 143}),
        "large-numbers": b"p" + lines(offered | {"port": 1 << 70}, ended | {"status": -1}, ended | {"round": 1e400}),
        "unknown": b"p" + lines({"say": "dance", "round": 1}, [1], None),
        "orders": b"l"
        + lines({"do": "alive"}, {"do": "offer", "round": 1}, start, {"do": "end", "status": 0, "reason": ""}),
        "stop": b"l" + lines(start, {"do": "stop", "round": 1, "reason": "\x1b[31mred\n"}, start | {"round": 2}),
        "unknown-order": b"l" + lines(start | {"port": 0}, {"do": "dance"}),
    }.items():
        yield "elastic", name, data


def main() -> None:
    """The program."""
    for target, name, data in seeds():
        (CORPUS / target).mkdir(parents=True, exist_ok=True)
        (CORPUS / target / name).write_bytes(data)


if __name__ == "__main__":
    main()
