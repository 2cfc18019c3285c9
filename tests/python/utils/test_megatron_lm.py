"""Names that programs import which train through Megatron-LM."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import accelerate.utils.megatron_lm as original
import pytest
import torch

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.megatron import MegatronLMPlugin
from accelerate_cpp.prepare.megatron.calls import GPTCall, Recorder
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


def accelerator(**fields: Any) -> Any:
    """What train steps look at of one."""
    plugin = MegatronLMPlugin(**fields)
    return SimpleNamespace(
        state=SimpleNamespace(megatron_lm_plugin=plugin), torch_device_mesh=None, parallelism_config=None
    )


def options(**given: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "model_return_dict": True,
            "return_logits": False,
            "eos_token_id": 2,
            "eod_mask_loss": False,
            "reset_position_ids": False,
            "reset_attention_mask": False,
            "megatron_dataset_flag": False,
            "pretraining_flag": True,
            "num_labels": 2,
            "bert_binary_head": True,
            **given,
        }
    )


def test_a_step_of_gpt_predicts_the_end_of_a_text_and_nothing_after_it() -> None:
    step = megatron_lm.GPTTrainStep(accelerator(), options())
    batch = {"input_ids": torch.tensor([[5, 6, 7], [5, 2, 7]]), "labels": torch.tensor([[5, 6, -100], [5, 6, 7]])}
    tokens, labels, mask, attention, positions = step.get_batch(iter([batch]))
    assert (tokens.tolist(), labels.tolist()) == ([[5, 6, 7], [5, 2, 7]], [[6, 7, 2], [2, 7, 2]])
    assert mask.tolist() == [[1, 0, 1], [1, 0, 1]]
    assert (attention, positions) == (None, None)
    assert step.model_output_class is not None
    without = megatron_lm.GPTTrainStep(accelerator(), options(eos_token_id=None, model_return_dict=False))
    assert without.get_batch(iter([batch]))[2].tolist() == [[1, 0, 0], [1, 1, 0]]
    assert without.model_output_class is None


def test_a_loss_is_over_what_counts_and_is_reported_as_a_sum_and_a_number() -> None:
    step = megatron_lm.GPTTrainStep(accelerator(), options())
    loss, reported = step.loss_func(torch.tensor([[1.0, 0.0, 1.0]]), torch.tensor([[2.0, 50.0, 4.0]]))
    assert (loss.item(), reported["lm loss"]) == (3.0, (6.0, 2.0))
    loss, reported = step.loss_func(torch.tensor([[0.0]]), (torch.tensor([[7.0]]), torch.ones(1, 1, 3)))
    assert (loss.item(), list(reported)) == (0.0, ["lm loss", "logits"])  # nothing counts


def test_batches_in_megatrons_own_form_have_one_token_more() -> None:
    step = megatron_lm.GPTTrainStep(accelerator(), options(megatron_dataset_flag=True))
    tokens, labels, mask, *_ = step.get_batch(iter([{"text": torch.tensor([[5, 2, 7, 8]])}]))
    assert (tokens.tolist(), labels.tolist(), mask.tolist()) == ([[5, 2, 7]], [[2, 7, 8]], [[1, 0, 1]])
    bert = megatron_lm.BertTrainStep(accelerator(), options(megatron_dataset_flag=True))
    names = ["text", "types", "labels", "is_random", "loss_mask", "padding_mask"]
    batch = {name: torch.tensor([[number]]) for number, name in enumerate(names)}
    assert [one.item() for one in bert.get_batch(iter([batch]))] == [0, 1, 3, 4, 2, 5]
    t5 = megatron_lm.T5TrainStep(accelerator(), options(megatron_dataset_flag=True))
    names = ["text_enc", "text_dec", "loss_mask", "labels", "enc_mask", "dec_mask", "enc_dec_mask"]
    found = t5.get_batch(iter([{name: torch.tensor([[number]]) for number, name in enumerate(names)}]))
    assert [one.item() for one in found] == [0, 1, 2, 3, False, False, False]


def test_masks_of_t5_are_the_originals() -> None:
    there = torch.tensor([[1, 1, 0], [1, 1, 1]])
    own, theirs = megatron_lm.T5TrainStep, original.T5TrainStep
    assert torch.equal(own.attn_mask_postprocess(there), theirs.attn_mask_postprocess(there))
    assert torch.equal(own.get_decoder_mask(4, "cpu"), theirs.get_decoder_mask(4, "cpu"))
    assert torch.equal(own.get_enc_dec_mask(there, 2, "cpu"), theirs.get_enc_dec_mask(there, 2, "cpu"))


def test_a_decoder_reads_what_it_has_written() -> None:
    step = megatron_lm.T5TrainStep(accelerator(), options())
    batch = {"input_ids": torch.tensor([[5, 6]]), "labels": torch.tensor([[7, -100, 8]])}
    _, read, mask, labels, *_ = step.get_batch(iter([batch]))
    assert (read.tolist(), mask.tolist(), labels.tolist()) == ([[0, 7, 0]], [[1, 0, 1]], [[7, -100, 8]])


@pytest.mark.parametrize("kind", STEPS)
def test_functions_of_the_program_replace_those_of_a_kind(kind: Any) -> None:
    own = {"custom_get_batch_function": len, "custom_loss_function": max}
    step = kind(accelerator(**own), options())
    assert (step.get_batch, step.loss_func) == (len, max)


def test_texts_packed_into_a_row_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="reset_position_ids=True; texts that are packed"):
        megatron_lm.GPTTrainStep(accelerator(), options(reset_position_ids=True))


def test_a_mask_that_hides_more_than_what_follows_is_refused() -> None:
    call = GPTCall()
    causal = torch.ones(1, 1, 3, 3, dtype=torch.bool).triu(1)
    tokens = torch.tensor([[1, 2, 3]])
    assert list(call.inputs(tokens, None, causal)) == ["input_ids"]
    causal[..., 2, 0] = True
    with pytest.raises(InvalidArgument, match=r"shape \[1, 1, 3, 3\] that hides more than the following tokens"):
        call.inputs(tokens, None, causal)


def test_a_train_step_hands_on_what_the_model_returned() -> None:
    recorder = Recorder(GPTCall())
    with pytest.raises(InvalidArgument, match="returned a int in place of what the model returned"):
        recorder.inputs(3)
    returned = recorder(torch.tensor([[1, 2]]), None, None, labels=torch.tensor([[2, 3]]))
    assert list(recorder.inputs(returned)) == ["input_ids"]
    assert recorder.outputs(torch.zeros(1, 2, 4)).tolist() == [[pytest.approx(math.log(4))] * 2]


def test_stand_ins_for_data_need_a_plugin_and_a_function_that_reads_them() -> None:
    loader = megatron_lm.MegatronLMDummyDataLoader(micro_batch_size=4, seed=3)
    assert loader.dataset_args == {"micro_batch_size": 4, "seed": 3, "megatron_dataset_flag": True}
    with pytest.raises(InvalidArgument, match="this run has no MegatronLMPlugin"):
        loader.set_megatron_data_args()
    with pytest.raises(
        InvalidArgument, match="only Megatron-LM reads its indexed files; pass custom_megatron_datasets"
    ):
        loader.get_train_valid_test_datasets_provider(accelerator())
