"""Recipes of fp8 training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from accelerate_cpp.errors import InvalidArgument, MissingLibrary
from accelerate_cpp.plugins.fp8_recipes import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
    resolve_recipe,
)

Install = Callable[..., None]

TE_DEFAULTS = {
    "use_autocast_during_eval": False,
    "margin": 0,
    "interval": 1,
    "fp8_format": "HYBRID",
    "amax_history_len": 1024,
    "amax_compute_algo": "most_recent",
    "override_linear_precision": (False, False, False),
    "use_mxfp8_block_scaling": False,
}


def values(recipe: Any) -> dict[str, Any]:
    return {field.name: getattr(recipe, field.name) for field in fields(recipe)}


class TestTorchao:
    def test_the_default_configuration_pads_and_gathers_in_fp8(self) -> None:
        recipe = AORecipeKwargs()
        assert (recipe.pad_inner_dim, recipe.enable_fsdp_float8_all_gather) == (True, True)
        assert (recipe.config.pad_inner_dim, recipe.config.enable_fsdp_float8_all_gather) == (True, True)
        assert recipe.to_kwargs() == {}

    def test_flags_and_the_environment_change_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_FP8_PAD_INNER_DIM", "false")
        monkeypatch.setenv("ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", "false")
        recipe = AORecipeKwargs(enable_fsdp_float8_all_gather=True)
        assert (recipe.config.pad_inner_dim, recipe.config.enable_fsdp_float8_all_gather) == (False, True)
        assert recipe.to_kwargs() == {"config": recipe.config, "pad_inner_dim": False}

    def test_a_configuration_of_the_users_own_is_left_alone(self) -> None:
        from torchao.float8 import Float8LinearConfig

        config = Float8LinearConfig.from_recipe_name("rowwise")
        recipe = AORecipeKwargs(config=config, module_filter_func=always)
        assert recipe.config is config
        assert recipe.pad_inner_dim is None
        assert recipe.fp8_config().options == {"config": config, "module_filter": always}

    def test_it_needs_torchao(self, only_installed: Install) -> None:
        only_installed("transformer_engine")
        with pytest.raises(ImportError, match=r"AORecipeKwargs: .*torchao.*not installed.*TERecipeKwargs"):
            AORecipeKwargs()


class TestTransformerEngine:
    @pytest.fixture(autouse=True)
    def _installed(self, only_installed: Install) -> None:
        only_installed("transformer_engine")

    def test_defaults_are_the_known_ones_in_the_known_order(self) -> None:
        assert list(values(TERecipeKwargs()).items()) == list(TE_DEFAULTS.items())
        assert TERecipeKwargs().to_kwargs() == {}

    @pytest.mark.parametrize(
        ("variable", "text", "field", "value"),
        [
            ("USE_AUTOCAST_DURING_EVAL", "true", "use_autocast_during_eval", True),
            ("MARGIN", "2", "margin", 2),
            ("INTERVAL", "3", "interval", 3),
            ("FORMAT", "e4m3", "fp8_format", "E4M3"),
            ("AMAX_HISTORY_LEN", "16", "amax_history_len", 16),
            ("AMAX_COMPUTE_ALGO", "MAX", "amax_compute_algo", "max"),
            ("OVERRIDE_DGRAD", "1", "override_linear_precision", (False, True, False)),
            ("USE_MXFP8_BLOCK_SCALING", "yes", "use_mxfp8_block_scaling", True),
        ],
    )
    def test_the_environment_sets_what_is_not_given(
        self, variable: str, text: str, field: str, value: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(f"ACCELERATE_FP8_{variable}", text)
        recipe = TERecipeKwargs()
        assert values(recipe) == {**TE_DEFAULTS, field: value}
        assert recipe.to_kwargs() == {field: value}
        assert getattr(TERecipeKwargs(**{field: TE_DEFAULTS[field]}), field) == TE_DEFAULTS[field]

    @pytest.mark.parametrize(
        ("field", "expected"), [("fp8_format", "HYBRID, E4M3, E5M2"), ("amax_compute_algo", "max, most_recent")]
    )
    def test_other_values_are_refused(self, field: str, expected: str) -> None:
        with pytest.raises(InvalidArgument, match=rf"TERecipeKwargs\.{field}=.*: expected one of {expected}"):
            TERecipeKwargs(**{field: "other"})  # type: ignore[arg-type]

    def test_only_what_differs_from_the_defaults_is_handed_on(self) -> None:
        assert TERecipeKwargs(margin=1).fp8_config().options == {"margin": 1}


class TestMsAmp:
    def test_it_has_a_level(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert values(MSAMPRecipeKwargs()) == {"opt_level": "O2"}
        monkeypatch.setenv("ACCELERATE_FP8_OPT_LEVEL", "O1")
        assert MSAMPRecipeKwargs().fp8_config().options == {"opt_level": "O1"}
        with pytest.raises(InvalidArgument, match=r"MSAMPRecipeKwargs\.opt_level='O3': expected one of O1, O2"):
            MSAMPRecipeKwargs(opt_level="O3")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:FP8RecipeKwargs is deprecated:FutureWarning")
class TestDeprecated:
    def test_it_has_the_fields_of_two_recipes_and_the_library(self, only_installed: Install) -> None:
        only_installed("transformer_engine")
        recipe = FP8RecipeKwargs(margin=1)
        assert list(values(recipe).items()) == list(
            {"opt_level": "O2", **TE_DEFAULTS, "margin": 1, "backend": "TE"}.items()
        )
        assert (recipe.fp8_config().backend, recipe.fp8_config().options) == ("TE", {"margin": 1})

    def test_ms_amp_is_preferred_where_it_is_installed(self, only_installed: Install) -> None:
        only_installed("transformer_engine", "msamp")
        assert FP8RecipeKwargs().fp8_config().backend == "MSAMP"
        assert FP8RecipeKwargs(backend="te").fp8_config().backend == "TE"  # type: ignore[arg-type]
        assert FP8RecipeKwargs(opt_level="O1").fp8_config().options == {"opt_level": "O1"}

    def test_the_environment_says_which(self, only_installed: Install, monkeypatch: pytest.MonkeyPatch) -> None:
        only_installed("transformer_engine", "msamp")
        monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
        assert FP8RecipeKwargs().backend == "TE"
        monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "AO")
        with pytest.raises(InvalidArgument, match=r"backend='AO': expected one of MSAMP, TE"):
            FP8RecipeKwargs()

    def test_its_library_is_needed(self, only_installed: Install) -> None:
        only_installed("torchao")
        with pytest.raises(MissingLibrary, match="transformer_engine"):
            FP8RecipeKwargs()


def test_the_deprecated_recipe_warns_of_itself(only_installed: Install) -> None:
    only_installed("transformer_engine")
    with pytest.warns(FutureWarning, match="use TERecipeKwargs or MSAMPRecipeKwargs"):
        FP8RecipeKwargs()


class TestSettling:
    def test_other_precisions_need_no_recipe_and_refuse_one(self) -> None:
        assert resolve_recipe("bf16", []) is None
        with pytest.raises(InvalidArgument, match=r"MSAMPRecipeKwargs, but mixed_precision is 'no'"):
            resolve_recipe("no", [MSAMPRecipeKwargs()])

    def test_without_a_recipe_the_chosen_library_has_its_default_one(
        self, only_installed: Install, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert resolve_recipe("fp8", []) == AORecipeKwargs()
        only_installed("transformer_engine", "msamp")
        assert resolve_recipe("fp8", []) == TERecipeKwargs()
        monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "MSAMP")
        assert resolve_recipe("fp8", []) == MSAMPRecipeKwargs()

    def test_a_recipe_wins_over_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
        recipe = AORecipeKwargs()
        assert resolve_recipe("fp8", [recipe]) is recipe

    def test_two_recipes_and_one_without_its_library_are_refused(self, only_installed: Install) -> None:
        with pytest.raises(InvalidArgument, match=r"2 fp8 recipes \(AORecipeKwargs, MSAMPRecipeKwargs\)"):
            resolve_recipe("fp8", [AORecipeKwargs(), MSAMPRecipeKwargs()])
        only_installed("torchao")
        with pytest.raises(MissingLibrary, match=r"MSAMPRecipeKwargs: .*msamp, which is not installed"):
            resolve_recipe("fp8", [MSAMPRecipeKwargs()])


def always(module: Any, name: str) -> bool:
    return True
