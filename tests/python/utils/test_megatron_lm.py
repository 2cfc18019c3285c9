"""Names that programs import which train through Megatron-LM."""

from __future__ import annotations

from typing import Any

import accelerate.utils.megatron_lm as original
import pytest

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.utils import megatron_lm

STEPS = [megatron_lm.BertTrainStep, megatron_lm.GPTTrainStep, megatron_lm.T5TrainStep]


def test_a_stand_in_for_a_schedule_holds_what_it_is_given() -> None:
    own, theirs = (module.MegatronLMDummyScheduler("o", 10, 2, foo=3) for module in (megatron_lm, original))
    assert vars(own) == vars(theirs)
    assert vars(megatron_lm.MegatronLMDummyScheduler("o")) == vars(original.MegatronLMDummyScheduler("o"))


def test_a_step_of_the_users_own_has_a_name_and_says_what_it_lacks() -> None:
    class Step(megatron_lm.AbstractTrainStep):
        def get_loss_func(self, accelerator: Any) -> Any:
            return accelerator

    step = Step("mine")
    assert (step.name, step.get_loss_func(3)) == ("mine", 3)
    with pytest.raises(NotImplementedError, match="Step has no get_batch_func; a subclass of AbstractTrainStep"):
        step.get_batch_func(None, False)
    with pytest.raises(NotImplementedError, match="Step has no get_forward_step_func"):
        step.get_forward_step_func()
    with pytest.raises(NotImplementedError, match="AbstractTrainStep has no get_loss_func"):
        megatron_lm.AbstractTrainStep("base").get_loss_func(None)


@pytest.mark.parametrize("step", STEPS)
def test_steps_that_need_megatron_are_refused(step: Any) -> None:
    assert issubclass(step, megatron_lm.AbstractTrainStep)
    with pytest.raises(InvalidArgument, match=rf"{step.__name__}\(\.\.\.\): training through Megatron-LM"):
        step(None, None)


@pytest.mark.parametrize(
    ("step", "method"),
    [(step, name) for step in STEPS for name, value in vars(step).items() if not name.startswith("_")],
)
def test_their_methods_are_refused_too(step: Any, method: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{step.__name__}"):
        getattr(step, method)(None)
