"""The names of files that checkpoints, exported models and profiles have."""

from __future__ import annotations

from accelerate_cpp.checkpoint.names import MODEL_NAME as MODEL_NAME
from accelerate_cpp.checkpoint.names import OPTIMIZER_NAME as OPTIMIZER_NAME
from accelerate_cpp.checkpoint.names import RNG_STATE_NAME as RNG_STATE_NAME
from accelerate_cpp.checkpoint.names import SAFE_MODEL_NAME as SAFE_MODEL_NAME
from accelerate_cpp.checkpoint.names import SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME
from accelerate_cpp.checkpoint.names import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
from accelerate_cpp.checkpoint.names import SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME
from accelerate_cpp.checkpoint.names import SAMPLER_NAME as SAMPLER_NAME
from accelerate_cpp.checkpoint.names import SCALER_NAME as SCALER_NAME
from accelerate_cpp.checkpoint.names import SCHEDULER_NAME as SCHEDULER_NAME
from accelerate_cpp.checkpoint.names import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
from accelerate_cpp.checkpoint.names import WEIGHTS_NAME as WEIGHTS_NAME
from accelerate_cpp.checkpoint.names import WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME

PROFILE_PATTERN_NAME = "profile_{suffix}.json"
