"""Recipes of fp8 training: one for each library. Fields left at ``None`` are read from ``ACCELERATE_FP8_*``."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from accelerate_cpp.config import env_table, fp8
from accelerate_cpp.config.env_table import Variable
from accelerate_cpp.config.session_config import Fp8Config
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.handlers import KwargsHandler

__all__ = ["AORecipeKwargs", "FP8RecipeKwargs", "MSAMPRecipeKwargs", "TERecipeKwargs"]

_FORMATS = ("HYBRID", "E4M3", "E5M2")
_ALGORITHMS = ("max", "most_recent")
_LEVELS = ("O1", "O2")
_OVERRIDES = (env_table.FP8_OVERRIDE_FPROP, env_table.FP8_OVERRIDE_DGRAD, env_table.FP8_OVERRIDE_WGRAD)


class _Recipe(KwargsHandler, ABC):
    """A recipe whose fields can be set by environment variables."""

    _variables: ClassVar[Mapping[str, Variable[Any]]] = {}

    def _fill(self) -> None:
        """Sets the fields that are ``None`` from their variables."""
        for name, variable in self._variables.items():
            if getattr(self, name) is None:
                setattr(self, name, variable.get())

    def _require_one_of(self, name: str, expected: tuple[str, ...]) -> None:
        found = getattr(self, name)
        if found not in expected:
            raise InvalidArgument(f"{type(self).__name__}.{name}={found!r}: expected one of {', '.join(expected)}")

    def _defaults(self) -> dict[str, Any]:
        return {name: variable.default for name, variable in self._variables.items()}

    @abstractmethod
    def fp8_config(self) -> Fp8Config:
        """The configuration for the session."""


@dataclass
class AORecipeKwargs(_Recipe):
    """Options of fp8 training through torchao, on CPUs (which imitate it) and GPUs.

    Attributes:
        config: torchao's ``Float8LinearConfig``; ``None`` creates one from the two flags below.
        module_filter_func: called with each linear layer and its dotted name; returns whether that layer computes in
            fp8. ``None``: all but the first and the last one of the model whose sizes are multiples of 16.
        pad_inner_dim: pad matrices to multiples of 16. ``None``: yes.
        enable_fsdp_float8_all_gather: gather sharded weights in fp8. ``None``: yes. It has no effect if every process
            holds the whole model.

    Raises:
        MissingLibrary: torchao is not installed.
    """

    config: Any = None
    module_filter_func: Callable[[Any, str], bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    _variables: ClassVar[Mapping[str, Variable[Any]]] = {
        "pad_inner_dim": env_table.FP8_PAD_INNER_DIM,
        "enable_fsdp_float8_all_gather": env_table.FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER,
    }

    def __post_init__(self) -> None:
        fp8.require("AO", type(self).__name__)
        if self.config is None:
            self._fill()
            self.config = _torchao_config(bool(self.pad_inner_dim), bool(self.enable_fsdp_float8_all_gather))

    def _defaults(self) -> dict[str, Any]:
        flags = super()._defaults()
        return {"config": _torchao_config(*flags.values()), "module_filter_func": None, **flags}

    def fp8_config(self) -> Fp8Config:
        return Fp8Config("AO", {"config": self.config, "module_filter": self.module_filter_func})


@dataclass
class TERecipeKwargs(_Recipe):
    """Options of fp8 training through TransformerEngine, on NVIDIA GPUs.

    Options with default values are left to TransformerEngine.

    Attributes:
        use_autocast_during_eval: compute in fp8 in evaluation mode, too.
        margin: powers of two kept free above the largest value.
        interval: steps between two updates of the scales.
        fp8_format: ``"HYBRID"``, ``"E4M3"`` or ``"E5M2"``.
        amax_history_len: how many steps' largest values determine the scales.
        amax_compute_algo: ``"most_recent"`` or ``"max"`` of that history.
        override_linear_precision: whether the forward pass, the gradients of activations and those of weights are
            computed in higher precision.
        use_mxfp8_block_scaling: a scale for each block of 32 values.

    Raises:
        MissingLibrary: TransformerEngine is not installed.
        ValueError: a field has another value than those listed.
    """

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: Literal["HYBRID", "E4M3", "E5M2"] | None = None
    amax_history_len: int | None = None
    amax_compute_algo: Literal["max", "most_recent"] | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None

    _variables: ClassVar[Mapping[str, Variable[Any]]] = {
        "use_autocast_during_eval": env_table.FP8_USE_AUTOCAST_DURING_EVAL,
        "margin": env_table.FP8_MARGIN,
        "interval": env_table.FP8_INTERVAL,
        "fp8_format": env_table.FP8_FORMAT,
        "amax_history_len": env_table.FP8_AMAX_HISTORY_LEN,
        "amax_compute_algo": env_table.FP8_AMAX_COMPUTE_ALGO,
        "use_mxfp8_block_scaling": env_table.FP8_USE_MXFP8_BLOCK_SCALING,
    }

    def __post_init__(self) -> None:
        fp8.require("TE", type(self).__name__)
        self._resolve()

    def _resolve(self) -> None:
        self._fill()
        if self.override_linear_precision is None:
            fprop, dgrad, wgrad = (variable.get() for variable in _OVERRIDES)
            self.override_linear_precision = (fprop, dgrad, wgrad)
        self.fp8_format = self.fp8_format.upper()  # type: ignore[assignment,union-attr]
        self._require_one_of("fp8_format", _FORMATS)
        self.amax_compute_algo = self.amax_compute_algo.lower()  # type: ignore[assignment,union-attr]
        self._require_one_of("amax_compute_algo", _ALGORITHMS)

    def _defaults(self) -> dict[str, Any]:
        return {**super()._defaults(), "override_linear_precision": (False, False, False)}

    def fp8_config(self) -> Fp8Config:
        return Fp8Config("TE", self.to_kwargs())


@dataclass
class MSAMPRecipeKwargs(_Recipe):
    """Options of fp8 training through MS-AMP, on NVIDIA GPUs; ``opt_level`` is ``"O1"`` or ``"O2"``."""

    opt_level: Literal["O1", "O2"] | None = None

    _variables: ClassVar[Mapping[str, Variable[Any]]] = {"opt_level": env_table.FP8_OPT_LEVEL}

    def __post_init__(self) -> None:
        self._fill()
        self._require_one_of("opt_level", _LEVELS)

    def fp8_config(self) -> Fp8Config:
        return Fp8Config("MSAMP", {"opt_level": self.opt_level})


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """Deprecated: options of ``backend`` ``"TE"`` or ``"MSAMP"``; use the recipe of that library.

    ``None`` uses ``ACCELERATE_FP8_BACKEND``, else MS-AMP if it is installed, else TransformerEngine.
    """

    backend: Literal["MSAMP", "TE"] | None = None

    _variables: ClassVar[Mapping[str, Variable[Any]]] = {
        **TERecipeKwargs._variables,
        **MSAMPRecipeKwargs._variables,
    }

    def __post_init__(self) -> None:
        warnings.warn(
            "FP8RecipeKwargs is deprecated; use TERecipeKwargs or MSAMPRecipeKwargs", FutureWarning, stacklevel=3
        )
        self.backend = (self.backend or self._default_backend()).upper()  # type: ignore[assignment]
        self._require_one_of("backend", ("MSAMP", "TE"))
        fp8.require(str(self.backend), type(self).__name__)
        self._resolve()
        self._require_one_of("opt_level", _LEVELS)

    @staticmethod
    def _default_backend() -> str:
        asked: str = env_table.FP8_BACKEND.get()
        return asked if asked != "NO" else "MSAMP" if fp8.is_installed("MSAMP") else "TE"

    def _defaults(self) -> dict[str, Any]:
        return {**super()._defaults(), "backend": "MSAMP" if fp8.is_installed("MSAMP") else "TE"}

    def fp8_config(self) -> Fp8Config:
        if self.backend == "MSAMP":
            return MSAMPRecipeKwargs.fp8_config(self)
        kwargs = self.to_kwargs()
        return Fp8Config("TE", {name: kwargs[name] for name in kwargs if name not in ("backend", "opt_level")})


Recipe = AORecipeKwargs | TERecipeKwargs | MSAMPRecipeKwargs | FP8RecipeKwargs
_RECIPES: Mapping[str, Callable[[], Recipe]] = {
    "AO": AORecipeKwargs,
    "TE": TERecipeKwargs,
    "MSAMP": MSAMPRecipeKwargs,
}


def resolve_recipe(precision: str, given: list[Recipe]) -> Recipe | None:
    """The recipe of a run: the one that was given, else one of the requested or installed library.

    Args:
        precision: of the run.
        given: the recipes among the handlers.

    Returns:
        ``None`` for another precision than ``"fp8"``.

    Raises:
        InvalidArgument: two recipes, or one without fp8.
        MissingLibrary: the library of the recipe is not installed.
    """
    names = ", ".join(type(recipe).__name__ for recipe in given)
    if len(given) > 1:
        raise InvalidArgument(f"kwargs_handlers contains {len(given)} fp8 recipes ({names}); pass one")
    if precision != "fp8":
        if given:
            raise InvalidArgument(
                f"kwargs_handlers contains {names}, but mixed_precision is {precision!r}; pass mixed_precision='fp8' "
                "with it, or leave it out"
            )
        return None
    recipe = given[0] if given else _RECIPES[fp8.choose()]()
    fp8.require(recipe.fp8_config().backend, type(recipe).__name__)
    return recipe


def _torchao_config(pad_inner_dim: bool, enable_fsdp_float8_all_gather: bool) -> Any:
    from torchao.float8 import Float8LinearConfig

    return Float8LinearConfig(pad_inner_dim=pad_inner_dim, enable_fsdp_float8_all_gather=enable_fsdp_float8_all_gather)


def with_recipe(handlers: dict[type[KwargsHandler], Any], precision: str) -> dict[type[KwargsHandler], Any]:
    """``handlers``, with the default recipe if ``precision`` is ``"fp8"`` and they contain none; see resolve_recipe."""
    recipe = resolve_recipe(precision, [handler for handler in handlers.values() if isinstance(handler, Recipe)])
    return handlers if recipe is None else {**handlers, type(recipe): recipe}
