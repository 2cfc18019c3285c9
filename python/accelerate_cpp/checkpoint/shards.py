"""A model in files of a limited size, with an index that maps tensors to files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from accelerate_cpp.checkpoint.archive import write_pickle
from accelerate_cpp.checkpoint.files import parse_size, sync_folder, write_bytes
from accelerate_cpp.checkpoint.manifest import is_checkpoint
from accelerate_cpp.checkpoint.names import MODEL_NAME, SAFE_MODEL_NAME
from accelerate_cpp.checkpoint.safetensors_file import place_of, without_duplicates, write_safetensors
from accelerate_cpp.config.file import waiting_name


def split(state: Mapping[str, Any], max_bytes: int) -> list[dict[str, Any]]:
    """Consecutive tensors until a shard would be larger than ``max_bytes``; a larger tensor gets its own shard.

    Tensors that use the same memory stay together, and count once.
    """
    shards: list[dict[str, Any]] = []
    current: dict[str, Any] = {}
    current_bytes = 0
    shard_of: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, tensor in state.items():
        place, size = _place_and_bytes(tensor)
        if place in shard_of:
            shard_of[place][name] = tensor
        elif size > max_bytes:
            shards.append({name: tensor})
            shard_of[place] = shards[-1]
        else:
            if current and current_bytes + size > max_bytes:
                shards.append(current)
                current, current_bytes = {}, 0
            current[name] = tensor
            current_bytes += size
            shard_of[place] = current
    return [*shards, current] if current or not shards else shards


def _place_and_bytes(value: Any) -> tuple[tuple[Any, ...], int]:
    if not isinstance(value, torch.Tensor):
        return (id(value),), 0
    return place_of(value), value.numel() * value.element_size()


def save_in_shards(
    state: Mapping[str, Any], folder: Path, max_shard_size: int | str = "10GB", safe_serialization: bool = True
) -> None:
    """Writes ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and so on, and an index of these.

    Every file is moved into place when it is on the disk, the index last; shards of an earlier save that are not
    replaced are then removed. Where some are replaced, there is no index meanwhile: it would be one of two saves.

    Args:
        max_shard_size: bytes, or as ``"5GB"``.
        safe_serialization: if false, ``pytorch_model*.bin`` by ``torch.save``.

    Raises:
        ValueError: ``max_shard_size`` cannot be understood, or safetensors files cannot store a value.
        OSError: the system refused to write.
    """
    limit = parse_size(max_shard_size)
    stem, suffix = (SAFE_MODEL_NAME, "safetensors") if safe_serialization else (MODEL_NAME, "bin")
    shards = split(without_duplicates(state, warns=True) if safe_serialization else state, limit)
    count = len(shards)
    names = [f"{stem}-{number:05d}-of-{count:05d}.{suffix}" for number in range(1, count + 1)]
    if count == 1:
        names = [f"{stem}.{suffix}"]
    folder.mkdir(parents=True, exist_ok=True)
    waiting = {name: waiting_name(folder / name) for name in names}
    index_name = f"{stem}.{suffix}.index.json"
    try:
        for name, shard in zip(names, shards, strict=True):
            (write_safetensors if safe_serialization else write_pickle)(waiting[name], shard)
        if count > 1:
            waiting[index_name] = waiting_name(folder / index_name)
            write_bytes(waiting[index_name], _index(names, shards).encode())
        if count > 1 and any((folder / name).exists() for name in names):
            (folder / index_name).unlink(missing_ok=True)
            sync_folder(folder)
        for name, path in waiting.items():
            os.replace(path, folder / name)
        sync_folder(folder)
    finally:
        for path in waiting.values():
            path.unlink(missing_ok=True)
    _remove_stale(folder, stem, suffix, {*waiting})
    sync_folder(folder)


def _index(names: list[str], shards: list[dict[str, Any]]) -> str:
    sizes = dict(_place_and_bytes(tensor) for shard in shards for tensor in shard.values())
    where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def _remove_stale(folder: Path, stem: str, suffix: str, written: set[str]) -> None:
    """Removes files of an earlier save: who loads the folder would take a whole file before shards."""
    of_saves = [rf"{stem}-\d{{5}}-of-\d{{5}}\.{suffix}", rf"{stem}\.{suffix}\.index\.json"]
    if not is_checkpoint(folder):  # whose model it would be
        of_saves.append(rf"{stem}\.{suffix}")
    pattern = re.compile("|".join(of_saves))
    for path in folder.iterdir():
        if pattern.fullmatch(path.name) and path.name not in written and path.is_file():
            path.unlink()
