"""The names of the files of a checkpoint, which are those of the original."""

from __future__ import annotations

MODEL_NAME = "pytorch_model"
SAFE_MODEL_NAME = "model"
OPTIMIZER_NAME = "optimizer"
SHARDED_MODEL_NAME = "pytorch_model_fsdp"
SCHEDULER_NAME = "scheduler"
SAMPLER_NAME = "sampler"
SCALER_NAME = "scaler.pt"
RNG_STATE_NAME = "random_states"

WEIGHTS_NAME = f"{MODEL_NAME}.bin"
WEIGHTS_PATTERN_NAME = f"{MODEL_NAME}{{suffix}}.bin"
WEIGHTS_INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
SAFE_WEIGHTS_NAME = f"{SAFE_MODEL_NAME}.safetensors"
SAFE_WEIGHTS_PATTERN_NAME = f"{SAFE_MODEL_NAME}{{suffix}}.safetensors"
SAFE_WEIGHTS_INDEX_NAME = f"{SAFE_WEIGHTS_NAME}.index.json"

SHARDED_MODEL_FILE = f"{SHARDED_MODEL_NAME}.bin"
OPTIMIZER_FILE = f"{OPTIMIZER_NAME}.bin"
SCHEDULER_FILE = f"{SCHEDULER_NAME}.bin"
LOADER_FILE = "dl_state_dict.bin"


_MARK = ".of_place_"


def mark_name(place: int) -> str:
    """A file in the temporary folder on the disk of the process in this place, until the checkpoint is complete."""
    return f"{_MARK}{place}"


def is_mark(name: str) -> bool:
    """Whether a file of a temporary folder has the name of such a mark."""
    return name.startswith(_MARK)


def random_states_name(rank: int) -> str:
    """The file of the random states of ``rank``."""
    return f"{RNG_STATE_NAME}_{rank}.pkl"


def own_loader_name(rank: int) -> str:
    """The file of a loader's state on ``rank``, if it differs from that on rank 0."""
    stem, suffix = LOADER_FILE.rsplit(".", 1)
    return f"{stem}_rank{rank}.{suffix}"
