"""Sharded models train as one process on the whole batch does, whatever the sizes, options and backends."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from network_namespaces import ADDRESSES, Host
from processes import run_processes
from scenarios import failures_of, outlive_the_others
from training_patterns import zoo

# Torch is imported inside the functions: each runs in a process of its own, and the collecting one needs none of it.

STEPS = 10

# The ways to train in shards, each as what the environment says.
GATHERED: dict[str, str] = {}
ONCE_PER_HOST = {"FSDP_WEIGHTS_ONCE_PER_HOST": "true"}
ZERO_1, ZERO_2, ZERO_3 = ({"FSDP_ZERO_STAGE": str(stage)} for stage in (1, 2, 3))


def way_of(environment: dict[str, str]) -> str:
    """Its name."""
    return next((" ".join(one) for one in environment.items() if one[0].startswith("FSDP_")), "gathered")


SCENARIOS: dict[str, Callable[[], None]] = {}


def is_zero() -> bool:
    """Whether units do not matter, as nothing is gathered."""
    return "FSDP_ZERO_STAGE" in os.environ


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[function.__name__] = function
    return function


def accelerator(plugin: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """One whose models are sharded in the units of a decoder's blocks, unless the plugin says otherwise."""
    from accelerate_cpp import Accelerator
    from accelerate_cpp.state import AcceleratorState, GradientState
    from accelerate_cpp.utils import FullyShardedDataParallelPlugin

    AcceleratorState._reset_state()
    GradientState._reset_state()
    options = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["DecoderBlock"]}
    chosen = FullyShardedDataParallelPlugin(**{"fsdp_version": 2, **options, **(plugin or {})})
    return Accelerator(cpu=True, fsdp_plugin=chosen, **arguments)


def decoder(seed: int = 0, **options: Any) -> Any:
    import torch

    torch.manual_seed(seed)
    return zoo().Decoder(**options)


def words(step: int, share: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(100 * step + share)
    return torch.randint(zoo().WORDS, (2, 9), generator=generator)


def loss_of(model: Any, batch: Any, sums: bool = False) -> Any:
    import torch

    logits = model(batch[:, :-1])
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum" if sums else "mean"
    )


def sgd(parameters: Any) -> Any:
    import torch

    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> Any:
    import torch

    return torch.optim.AdamW(parameters, lr=0.01)


def one_process(
    model: Any, make_optimizer: Callable[[Any], Any], shares: int, micro_batches: int = 1, max_norm: float | None = None
) -> tuple[list[float], list[float]]:
    """Plain torch on the batches of all ranks together: the losses and the norms of the gradients."""
    import torch

    optimizer = make_optimizer([weight for weight in model.parameters() if weight.requires_grad])
    losses, norms = [], []
    for step in range(STEPS):
        batch = torch.cat([words(micro_batches * step + m, r) for m in range(micro_batches) for r in range(shares)])
        loss = loss_of(model, batch)
        loss.backward()
        if max_norm is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def sharded(
    run: Any, model: Any, optimizer: Any, micro_batches: int = 1, max_norm: float | None = None, first: int = 0
) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(first, STEPS):
        total = 0.0
        for m in range(micro_batches):
            with run.accumulate(model):
                loss = loss_of(model, words(micro_batches * step + m, run.process_index))
                run.backward(loss)
                if max_norm is not None and run.sync_gradients:
                    norms.append(run.clip_grad_norm_(model.parameters(), max_norm).item())
                optimizer.step()
                optimizer.zero_grad()
                total += run.reduce(loss.detach(), "mean").item() / micro_batches
        losses.append(total)
    return losses, norms


def same(found: Any, expected: Any, rtol: float = 1e-5) -> None:
    import torch

    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=rtol, atol=1e-7)


def same_weights(run: Any, model: Any, expected: Any, rtol: float = 1e-4) -> None:
    import torch

    state = run.get_state_dict(model)
    assert (list(state) == list(expected.state_dict())) if run.is_main_process else state == {}
    for name, value in state.items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=rtol, atol=1e-5, msg=name)


def compare(
    plugin: dict[str, Any] | None = None,
    make_optimizer: Callable[[Any], Any] = sgd,
    micro_batches: int = 1,
    max_norm: float | None = None,
    rtol: float = 1e-5,
    **arguments: Any,
) -> Any:
    """Trains sharded on all ranks, and plainly in each process; ranks begin with different weights."""
    run = accelerator(plugin, gradient_accumulation_steps=micro_batches, **arguments)
    expected = decoder()
    model = decoder(seed=run.process_index)
    optimizer = make_optimizer(model.parameters())
    model, optimizer = run.prepare(model, optimizer)
    losses, norms = sharded(run, model, optimizer, micro_batches, max_norm)
    shares = run.num_processes
    plain_losses, plain_norms = one_process(expected, make_optimizer, shares, micro_batches, max_norm)
    same(losses, plain_losses, rtol)
    same(norms, plain_norms, max(rtol, 1e-4))
    return run, model, optimizer, expected


@scenario
def values_are_clipped_after_another_forward_pass() -> None:
    """Models that have gathered their weights show others than those that are stepped."""
    import torch

    run = accelerator()
    model, optimizer = run.prepare(own := decoder(), sgd(own.parameters()))
    run.backward(loss_of(model, words(0, run.process_index)))
    with torch.no_grad():
        model(words(1, run.process_index)[:, :-1])
    run.clip_grad_value_(model.parameters(), 1e-3)
    largest = [
        getattr(one.grad, "_local_tensor", one.grad).abs().max().item()
        for group in optimizer.param_groups
        for one in group["params"]
        if one.grad is not None and getattr(one.grad, "_local_tensor", one.grad).numel() > 0
    ]
    assert largest
    assert max(largest) <= 1e-3 * (1 + 1e-6), max(largest)


@scenario
def losses_and_weights_with_sgd() -> None:
    run, model, _, expected = compare()
    same_weights(run, model, expected)


@scenario
def the_first_backward_pass_warns_of_nothing() -> None:
    import warnings

    import torch

    run = accelerator()
    model = decoder()
    loader = torch.utils.data.DataLoader(words(0, 0), batch_size=1)
    model, _, loader = run.prepare(model, sgd(model.parameters()), loader)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(accelerator.prepare|of prepare)")
        for batch in loader:
            run.backward(loss_of(model, batch))


@scenario
def losses_with_adamw() -> None:
    compare(make_optimizer=adamw, rtol=1e-4)


@scenario
def optimizers_that_treat_elements_alone_and_others() -> None:
    import torch
    from torch.distributed.tensor import DTensor

    class ByNorm(torch.optim.SGD):
        """Steps of one length, which depends on all elements of a gradient."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for weight in self.param_groups[0]["params"]:
                weight.sub_(weight.grad / (weight.grad.norm() + 1e-3), alpha=0.1)

    makers: list[Callable[[Any], Any]] = [
        lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda weights: torch.optim.AdamW(weights, lr=0.01, amsgrad=True),
        lambda weights: torch.optim.Adam(weights, lr=0.01, foreach=True),
        lambda weights: torch.optim.AdamW(weights, lr=0.01, fused=True),
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        lambda weights: torch.optim.RMSprop(weights, lr=1e-3, momentum=0.5, centered=True),
        torch.optim.ASGD,
        torch.optim.Rprop,
        ByNorm,
    ]
    for make in makers:
        run = accelerator()
        expected, own = decoder(), decoder()
        losses, _ = one_process(expected, make, run.num_processes)
        model, optimizer = run.prepare(own, make(own.parameters()))
        name = type(optimizer.optimizer).__name__
        found = sharded(run, model, optimizer)[0]
        # Steps of these have the size of the rate whatever the size of a gradient: roundings show in weights.
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-3, atol=1e-4, msg=name)
        for weight, state in optimizer.state.items():
            assert isinstance(weight, DTensor)
            entries = [one for one in state.values() if isinstance(one, torch.Tensor) and one.shape == weight.shape]
            assert all(isinstance(one, DTensor) for one in entries), name
        held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        assert held == {id(weight) for weight in model.parameters()}, name


@scenario
def a_step_has_plain_parts_unless_the_program_looks_at_it() -> None:
    import torch
    from torch.distributed.tensor import DTensor

    seen: list[type] = []

    class Looking(torch.optim.SGD):
        pass

    run = accelerator()
    own = decoder()
    model, optimizer = run.prepare(own, sgd(own.parameters()))
    step = optimizer.optimizer.step

    def looking(*args: Any) -> Any:
        seen.append(type(optimizer.optimizer.param_groups[0]["params"][0]))
        return step(*args)

    optimizer.optimizer.step = looking
    sharded(run, model, optimizer)
    assert set(seen) == {torch.Tensor}, seen
    seen.clear()
    handle = optimizer.optimizer.register_step_post_hook(lambda *_: None)
    sharded(run, model, optimizer)
    assert set(seen) == {DTensor}, seen
    handle.remove()
    optimizer.step(lambda: seen.append(type(optimizer.optimizer.param_groups[0]["params"][0])))
    assert seen[-1] is DTensor


@scenario
def a_step_that_raises_leaves_parameters_and_states() -> None:
    import torch

    run = accelerator()
    own = decoder()
    model, optimizer = run.prepare(own, adamw(own.parameters()))
    sharded(run, model, optimizer)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    states = {weight: dict(state) for weight, state in optimizer.state.items()}
    for group in optimizer.param_groups:
        group["betas"] = None
    run.backward(loss_of(model, words(0, run.process_index)))
    with pytest.raises(TypeError):
        optimizer.step()
    assert [id(one) for group in optimizer.param_groups for one in group["params"]] == [id(one) for one in weights]
    assert {weight: list(state) for weight, state in optimizer.state.items()} == {
        weight: list(state) for weight, state in states.items()
    }
    assert all(
        torch.equal(state["exp_avg"].to_local(), states[weight]["exp_avg"].to_local())
        for weight, state in optimizer.state.items()
    )


@scenario
def each_rank_has_its_part_of_parameters_gradients_and_states() -> None:
    run = accelerator()
    model = decoder()
    whole = sum(weight.numel() for weight in model.parameters())
    largest = max(len(weight) for weight in model.parameters())
    optimizer = adamw(model.parameters())
    model, optimizer = run.prepare(model, optimizer)
    run.backward(loss_of(model, words(0, run.process_index)))
    optimizer.step()
    tensors = list(model.parameters())
    assert largest > run.num_processes
    limit = 1.1 * whole / run.num_processes + 100
    assert sum(weight.to_local().numel() for weight in tensors) < limit
    assert sum(weight.grad.to_local().numel() for weight in tensors) < limit
    states = [optimizer.state[weight] for weight in tensors]
    assert sum(state["exp_avg"].to_local().numel() for state in states) < limit


@scenario
def without_freeing_after_the_forward_pass() -> None:
    compare({"reshard_after_forward": False})


@scenario
def the_whole_model_as_one_unit() -> None:
    compare({"auto_wrap_policy": "no_wrap", "transformer_cls_names_to_wrap": None})


@scenario
def units_by_size() -> None:
    from torch.distributed.fsdp import FSDPModule

    _, model, _, _ = compare(
        {"auto_wrap_policy": "size_based_wrap", "min_num_params": 2000, "transformer_cls_names_to_wrap": None}
    )
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    assert is_zero() or len(units) > 1
    assert is_zero() or any(isinstance(unit, zoo().DecoderBlock) for unit in units)


@scenario
def units_by_a_function_and_by_classes() -> None:
    from functools import partial

    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, lambda_auto_wrap_policy

    def is_block(module: Any) -> bool:
        return isinstance(module, zoo().DecoderBlock)

    policies = (partial(lambda_auto_wrap_policy, lambda_fn=is_block), ModuleWrapPolicy({zoo().DecoderBlock}))
    for policy in policies:
        from torch.distributed.fsdp import FSDPModule

        _, model, _, _ = compare({"auto_wrap_policy": policy, "transformer_cls_names_to_wrap": None})
        blocks = [module for module in model.modules() if is_block(module)]
        assert is_zero() or all(isinstance(block, FSDPModule) for block in blocks)


@scenario
def activations_computed_again_with_the_same_dropout() -> None:
    import torch

    run = accelerator({"activation_checkpointing": True})
    model = decoder(dropout=0.3)
    names = list(model.state_dict())
    model, _ = run.prepare(model, sgd(model.parameters()))
    plain = accelerator()
    other, _ = plain.prepare(decoder(dropout=0.3), sgd(decoder().parameters()))
    assert list(model.state_dict()) == names
    for trained in (model, other):
        torch.manual_seed(5 + run.process_index)
        plain.backward(loss_of(trained, words(0, run.process_index)))
    for (name, weight), reference in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(weight.grad.to_local(), reference.grad.to_local(), msg=name)


@scenario
def activations_computed_again_from_inputs_on_the_host() -> None:
    compare({"activation_checkpointing": True, "activation_checkpointing_offload": True})


@scenario
def shards_on_the_host() -> None:
    compare({"cpu_offload": True})


@scenario
def three_micro_batches_per_step() -> None:
    run, model, _, expected = compare(micro_batches=3, max_norm=0.5)
    same_weights(run, model, expected)


@scenario
def three_micro_batches_each_synchronised() -> None:
    from accelerate_cpp.utils import GradientAccumulationPlugin

    run = accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3, sync_each_batch=True))
    model, expected = decoder(), decoder()
    model, optimizer = run.prepare(model, sgd(model.parameters()))
    losses, _ = sharded(run, model, optimizer, 3)
    same(losses, one_process(expected, sgd, run.num_processes, 3)[0])


@scenario
def gradients_clipped_by_their_joint_norm() -> None:
    compare(max_norm=0.5)


@scenario
def gradients_clipped_by_other_norms_and_by_value() -> None:
    import torch

    for norm_type in (1.0, 3.0, float("inf")):
        run = accelerator()
        model, expected = decoder(), decoder()
        model, _ = run.prepare(model, sgd(model.parameters()))
        run.backward(loss_of(model, words(0, run.process_index)))
        loss_of(expected, torch.cat([words(0, share) for share in range(run.num_processes)])).backward()
        norm = run.clip_grad_norm_(model.parameters(), 0.1, norm_type)
        same(norm.item(), torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.1, norm_type).item(), 1e-4)
        run.clip_grad_value_(model.parameters(), 0.001)
        torch.nn.utils.clip_grad_value_(expected.parameters(), 0.001)
        for (name, weight), plain in zip(model.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(weight.grad.full_tensor(), plain.grad, rtol=1e-4, atol=1e-6, msg=name)


@scenario
def gradients_clipped_by_the_model_as_with_version_1() -> None:
    import torch

    run = accelerator()
    model, expected = run.prepare(decoder()), decoder()
    shares = range(run.num_processes)
    run.backward(loss_of(model, words(0, run.process_index)))
    loss_of(expected, torch.cat([words(0, share) for share in shares])).backward()
    for norm_type in (2.0, 1.0):
        plain = torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.1, norm_type)
        same(model.clip_grad_norm_(0.1, norm_type).item(), plain.item(), 1e-4)
    for (_, weight), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(weight.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-7)


@scenario
def states_by_the_functions_of_torch() -> None:
    import torch
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    whole = StateDictOptions(full_state_dict=True)
    run = accelerator()
    model, expected = decoder(), decoder()
    model, optimizer = run.prepare(model, adamw(model.parameters()))
    plain = adamw(expected.parameters())
    shares = range(run.num_processes)
    run.backward(loss_of(model, words(0, run.process_index)))
    loss_of(expected, torch.cat([words(0, share) for share in shares])).backward()
    for one in (optimizer, plain):
        one.step()
    for name, value in get_model_state_dict(model, options=whole).items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-3, atol=1e-3, msg=name)
    state = get_optimizer_state_dict(model, optimizer.optimizer, options=whole)
    moments = {name: plain.state[weight]["exp_avg"] for name, weight in expected.named_parameters()}
    for name, moment in moments.items():
        torch.testing.assert_close(state["state"][name]["exp_avg"], moment, rtol=1e-4, atol=1e-6, msg=name)
    other = decoder(seed=1)
    other, fresh = run.prepare(other, adamw(other.parameters()))
    set_optimizer_state_dict(other, fresh.optimizer, state, options=whole)
    for name, weight in other.named_parameters():
        loaded = fresh.state[weight]["exp_avg"].full_tensor()
        torch.testing.assert_close(loaded, moments[name], rtol=1e-4, atol=1e-6, msg=name)


@scenario
def a_norm_that_is_not_finite_on_one_rank_is_so_on_all() -> None:
    import math

    run = accelerator()
    model = decoder()
    model, _ = run.prepare(model, sgd(model.parameters()))
    run.backward(loss_of(model, words(0, run.process_index)))
    if run.process_index == run.num_processes - 1:
        next(weight for weight in model.parameters() if weight.grad.to_local().numel()).grad.to_local().fill_(math.inf)
    assert math.isinf(run.clip_grad_norm_(model.parameters(), 1.0).item())


@scenario
def losses_in_bf16() -> None:
    import torch

    run, model, _, _ = compare(mixed_precision="bf16", rtol=3e-2)

    assert all(weight.dtype == torch.float32 for weight in model.parameters())
    groups = run.precision_plan(model).groups
    by_autocast = {torch.float32} if is_zero() else set()  # layers that keep their precision
    assert {group.compute_dtype for group in groups} <= {torch.bfloat16, None} | by_autocast
    reduced = torch.float32 if is_zero() else torch.bfloat16
    assert {(group.storage_dtype, group.reduce_dtype) for group in groups} == {(torch.float32, reduced)}


@scenario
def losses_in_fp16_with_a_scale() -> None:
    from accelerate_cpp import GradScalerKwargs

    compare(mixed_precision="fp16", rtol=1e-2, max_norm=1.0, kwargs_handlers=[GradScalerKwargs(init_scale=256.0)])


@scenario
def an_overflow_in_the_shard_of_one_rank_is_one_of_all() -> None:
    import torch

    from accelerate_cpp import GradScalerKwargs

    for clips in (False, True):
        run = accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=256.0)])
        model = decoder()
        model, optimizer = run.prepare(model, sgd(model.parameters()))
        before = [weight.to_local().clone() for weight in model.parameters()]
        run.backward(loss_of(model, words(0, run.process_index)))
        if run.process_index == run.num_processes - 1:
            own = [weight.grad.to_local() for weight in model.parameters() if weight.grad.to_local().numel()]
            own[0].view(-1)[0] = torch.inf
        if clips:
            run.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert optimizer.step_was_skipped
        assert run.scaler.get_scale() == 128.0
        for old, weight in zip(before, model.parameters(), strict=True):
            assert torch.equal(old, weight.to_local())


@scenario
def sums_divided_by_their_weights() -> None:
    import torch

    run = accelerator(gradient_accumulation_steps=2)
    model, expected = decoder(), decoder()
    model, optimizer = run.prepare(model, sgd(model.parameters()))
    plain = sgd(expected.parameters())
    for step in range(3):
        rows = []
        for m in range(2):
            with run.accumulate(model):
                batches = [words(2 * step + m, share)[: 1 + (share + m) % 2] for share in range(run.num_processes)]
                own = batches[run.process_index]
                run.backward(loss_of(model, own, sums=True), weight=own[:, 1:].numel())
                optimizer.step()
                optimizer.zero_grad()
                rows += batches
        loss_of(expected, torch.cat(rows)).backward()
        plain.step()
        plain.zero_grad()
    same_weights(run, model, expected)


@scenario
def sums_of_a_model_all_of_whose_parameters_are_in_units() -> None:
    import torch

    torch.manual_seed(0)
    expected = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 2))
    run = accelerator({"transformer_cls_names_to_wrap": ["Linear"]}, gradient_accumulation_steps=2)
    model = copy.deepcopy(expected)
    model, optimizer = run.prepare(model, sgd(model.parameters()))
    rows = torch.randn(2, 4 * run.num_processes, 2)
    for inputs, kept in zip(rows, (2, 4), strict=True):
        own = inputs[4 * run.process_index :][:kept]
        with run.accumulate(model):
            run.backward(model(own).square().sum(), weight=len(own))
            optimizer.step()
    read = [
        inputs[4 * rank :][:kept]
        for inputs, kept in zip(rows, (2, 4), strict=True)
        for rank in range(run.num_processes)
    ]
    (expected(torch.cat(read)).square().sum() / sum(map(len, read))).backward()
    sgd(expected.parameters()).step()
    same_weights(run, model, expected)


@scenario
def sums_of_several_models_divided_by_their_own_weights() -> None:
    import torch

    run = accelerator()
    seeds = range(6)  # as many that a set would hardly have them in the same order on all ranks
    plain = [decoder(seed) for seed in seeds]
    models = list(run.prepare(*(decoder(seed) for seed in seeds)))
    shares = range(run.num_processes)
    for number, (model, expected) in enumerate(zip(models, plain, strict=True)):
        batches = [words(number, share)[: 1 + (share + number) % 2] for share in shares]
        own = batches[run.process_index]
        run.backward(loss_of(model, own, sums=True), weight=(1 + number) * own[:, 1:].numel())
        (loss_of(expected, torch.cat(batches)) / (1 + number)).backward()
    for model, expected in zip(models, plain, strict=True):
        for (name, weight), other in zip(model.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(weight.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-6, msg=name)


@scenario
def optimizers_prepared_before_with_and_after_the_model() -> None:
    for order in ("before", "with", "after"):
        run = accelerator()
        model, expected = decoder(), decoder()
        optimizer = adamw(model.parameters())
        if order == "before":
            optimizer = run.prepare(optimizer)
            model = run.prepare(model)
        elif order == "with":
            optimizer, model = run.prepare(optimizer, model)
        else:
            model = run.prepare(model)
            optimizer = run.prepare(optimizer)
        losses, _ = sharded(run, model, optimizer)
        same(losses, one_process(expected, adamw, run.num_processes)[0], 1e-4)


@scenario
def an_optimizer_that_has_stepped_before() -> None:
    import torch

    run = accelerator()
    model, expected = decoder(), decoder()
    optimizer, plain = adamw(model.parameters()), adamw(expected.parameters())
    for trained, stepped in ((model, optimizer), (expected, plain)):
        loss_of(trained, words(77, 0)).backward()
        stepped.step()
        stepped.zero_grad()
    model, optimizer = run.prepare(model, optimizer)
    for step in range(4):
        run.backward(loss_of(model, words(step, run.process_index)))
        loss_of(expected, torch.cat([words(step, share) for share in range(run.num_processes)])).backward()
        for stepped in (optimizer, plain):
            stepped.step()
            stepped.zero_grad()
    same_weights(run, model, expected)


@scenario
def tied_weights_in_one_unit_and_across_units() -> None:
    import torch
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    def is_layer(module: Any) -> bool:
        return isinstance(module, torch.nn.TransformerEncoderLayer)

    def is_any_of_the_outermost(module: Any, recurse: bool, nonwrapped_numel: int) -> bool:
        return is_layer(module) or (type(module) in (torch.nn.Embedding, torch.nn.Linear) and len(module.weight) == 64)

    for policy in (ModuleWrapPolicy({torch.nn.TransformerEncoderLayer}), is_any_of_the_outermost):
        run = accelerator({"auto_wrap_policy": policy, "transformer_cls_names_to_wrap": None})
        torch.manual_seed(0)
        expected = zoo().TiedEncoder()
        torch.manual_seed(run.process_index)
        model = zoo().TiedEncoder()
        model, optimizer = run.prepare(model, sgd(model.parameters()))
        assert model.output.weight is model.embedding.weight
        assert is_zero() or isinstance(model.body.layers[0], FSDPModule)
        assert not isinstance(model.output, FSDPModule)
        losses, _ = sharded(run, model, optimizer)
        same(losses, one_process(expected, sgd, run.num_processes)[0])


@scenario
def parameters_that_are_frozen() -> None:
    run = accelerator()
    model, expected = decoder(), decoder()
    for one in (model, expected):
        for name, weight in one.named_parameters():
            weight.requires_grad_("norm" in name or "gate" in name)
    model, optimizer = run.prepare(model, sgd([weight for weight in model.parameters() if weight.requires_grad]))
    losses, _ = sharded(run, model, optimizer)
    same(losses, one_process(expected, sgd, run.num_processes)[0])
    same_weights(run, model, expected)


@scenario
def modules_that_are_ignored_are_averaged_all_the_same() -> None:
    from torch.distributed.tensor import DTensor

    run, model, _, expected = compare({"ignored_modules": r".*\.gate"}, max_norm=0.5)
    ignored = [weight for name, weight in model.named_parameters() if ".gate." in name]
    assert ignored
    assert not any(isinstance(weight, DTensor) for weight in ignored)
    same_weights(run, model, expected)


@scenario
def weights_that_only_rank_0_has() -> None:
    import torch

    run = accelerator({"cpu_ram_efficient_loading": True})
    expected = decoder()
    if run.process_index == 0:
        model = decoder()
    else:
        with torch.device("meta"):
            model = zoo().Decoder()
    model, optimizer = run.prepare(model, sgd(model.parameters()))
    losses, _ = sharded(run, model, optimizer)
    same(losses, one_process(expected, sgd, run.num_processes)[0])


@scenario
def buffers_are_those_of_rank_0_whatever_their_strides() -> None:
    import torch

    class WithTable(torch.nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 3)
            self.register_buffer("table", (torch.arange(6.0) + 100 * rank).reshape(2, 3).t())

    run = accelerator({"auto_wrap_policy": "no_wrap", "transformer_cls_names_to_wrap": None})
    model = run.prepare(WithTable(run.process_index))
    assert not model.table.is_contiguous()
    assert model.table.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


@scenario
def a_model_that_no_rank_has_stays_on_the_meta_device() -> None:
    import torch

    run = accelerator()
    with torch.device("meta"):
        model = zoo().Decoder()
    model = run.prepare(model)
    if is_zero():
        with pytest.raises(ValueError, match="has no values yet; load a checkpoint"):
            loss_of(model, words(0, 0))
        return
    assert all(weight.is_meta for weight in model.parameters())


@scenario
def different_models_are_refused_on_all_ranks() -> None:
    import torch

    run = accelerator({"auto_wrap_policy": "no_wrap", "transformer_cls_names_to_wrap": None})
    model = torch.nn.Linear(3, 4 if run.process_index == 1 else 5)
    with pytest.raises(ValueError, match=r"'weight' of Linear has shape \(4, 3\) on rank 1 and \(5, 3\) on rank 0"):
        run.prepare(model)


@scenario
def a_model_that_is_sharded_already_is_trained_as_it_is() -> None:
    from torch.distributed.fsdp import fully_shard

    run = accelerator()
    model, expected = decoder(), decoder()
    fully_shard(model)
    model, optimizer = run.prepare(model, sgd(model.parameters()))
    losses, _ = sharded(run, model, optimizer)
    same(losses, one_process(expected, sgd, run.num_processes)[0])


@scenario
def a_compiled_model_by_regions_and_as_a_whole() -> None:
    from accelerate_cpp.utils import TorchDynamoPlugin

    for regions in (True, False):
        compare(dynamo_plugin=TorchDynamoPlugin(backend="eager", use_regional_compilation=regions))


@scenario
def the_originals_functions_do_what_prepare_does() -> None:
    import torch
    from torch.distributed.fsdp import FSDPModule

    from accelerate_cpp.utils import fsdp2_apply_ac, fsdp2_prepare_model, get_fsdp2_grad_scaler

    run = accelerator({"activation_checkpointing": True})
    model = fsdp2_apply_ac(run, decoder())
    assert type(model.blocks[0]).__name__ == "CheckpointWrapper"
    run = accelerator()
    model = fsdp2_prepare_model(run, decoder())
    assert is_zero() or isinstance(model, FSDPModule)
    assert is_zero() or isinstance(model.blocks[0], FSDPModule)
    assert isinstance(get_fsdp2_grad_scaler(device="cpu", init_scale=2.0), torch.amp.GradScaler)


@scenario
def copies_of_shards() -> None:
    from accelerate_cpp import ParallelismConfig

    ranks = accelerator().num_processes
    if ranks != 4:
        return
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    run, model, _, expected = compare(parallelism_config=config, max_norm=0.5)
    assert next(model.parameters()).device_mesh.shape == (2, 2)
    assert (run.data_parallel_rank, run.data_parallel_shard_rank) == divmod(run.process_index, 2)
    same_weights(run, model, expected)


def trained_on_uneven(run: Any, rows: int) -> Any:
    """The model after a pass over ``rows`` in batches of two, which are dealt out in turn."""
    import torch

    model = decoder()
    optimizer = sgd(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    data = torch.utils.data.TensorDataset(torch.cat([words(number, 0) for number in range(rows)])[:rows])
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    model, optimizer, loader, schedule = run.prepare(model, optimizer, loader, schedule)
    with run.join_uneven_inputs([model], even_batches=False):
        for (batch,) in loader:
            with run.accumulate(model):
                run.backward(loss_of(model, batch))
                if run.sync_gradients:
                    run.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return model


@scenario
def uneven_inputs_train_as_copies_do() -> None:
    from accelerate_cpp import Accelerator
    from accelerate_cpp.state import AcceleratorState, GradientState

    for micro_batches in (1, 2):
        run = accelerator(gradient_accumulation_steps=micro_batches)
        turns = run.num_processes * 2 * micro_batches
        # Rank 0 alone has the last batch; some have one more than others; and most have none at all.
        lengths = [turns + 2, turns + 3, 2] if micro_batches == 1 else [2 * turns + 2]
        if run.state.backend != "shm":
            lengths = [rows for rows in lengths if rows % 2 == 0]  # torch's wrapper does not weigh short batches
        for rows in lengths:
            run = accelerator(gradient_accumulation_steps=micro_batches)
            model = trained_on_uneven(run, rows)
            whole = run.get_state_dict(model)
            AcceleratorState._reset_state()
            GradientState._reset_state()
            plain = Accelerator(cpu=True, gradient_accumulation_steps=micro_batches)
            expected = plain.get_state_dict(trained_on_uneven(plain, rows))
            for name, value in whole.items():
                same(value.tolist(), expected[name].tolist(), 1e-4)


@scenario
def uneven_inputs_of_loops_in_which_processes_would_count_wrongly_are_refused() -> None:
    import torch

    run = accelerator()
    model, loader = run.prepare(decoder(), torch.utils.data.DataLoader(words(0, 0), batch_size=1))
    with run.join_uneven_inputs([model]):
        with pytest.raises(ValueError, match="reads no prepared loader"):
            loss_of(model, words(0, 0))
        with pytest.raises(ValueError, match="is no sample for metrics"):
            run.gather_for_metrics(torch.ones(1))
        for batch in loader:
            loss = loss_of(model, batch)
            with pytest.raises(ValueError, match=r"call accelerator\.backward"):
                loss.backward()
    loss_of(model, words(0, 0))
    assert run.gather_for_metrics(torch.ones(1)).tolist() == [1.0] * run.num_processes


@scenario
def what_the_host_has_in_common_is_what_all_step_on() -> None:
    """Only where weights are once per host: the others would gather them into memory of their own."""
    if "FSDP_WEIGHTS_ONCE_PER_HOST" not in os.environ:
        return
    from accelerate_cpp.comm.host_group import HostGroup

    run = accelerator()
    model = decoder()
    model, optimizer = run.prepare(model, sgd(model.parameters()))
    run.backward(loss_of(model, words(0, run.process_index)))
    optimizer.step()
    model.unshard()
    gathered = {name: weight.data_ptr() for name, weight in model.named_parameters(recurse=False)}
    model.reshard()
    model.unshard()
    assert gathered == {name: weight.data_ptr() for name, weight in model.named_parameters(recurse=False)}
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "accelerate_cpp" in line]
    spans = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in mapped]
    assert gathered
    if len(HostGroup().ranks) == 1:  # then it is ordinary memory
        return
    assert all(any(begin <= address < end for begin, end in spans) for address in gathered.values())


@scenario
def version_1_by_its_own_names() -> None:
    if way_of(dict(os.environ)) in map(way_of, (ONCE_PER_HOST, ZERO_1, ZERO_2, ZERO_3)):
        return  # options of version 2
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from accelerate_cpp import ParallelismConfig

    one = {"fsdp_version": 1, "use_orig_params": True, "sync_module_states": True, "forward_prefetch": True}
    run, model, _, expected = compare({**one, "cpu_offload": True, "state_dict_type": "FULL_STATE_DICT"}, max_norm=0.5)
    assert isinstance(model.blocks[0], FSDPModule)
    assert not run.is_fsdp2
    same_weights(run, model, expected)
    _, model, _, _ = compare({**one, "sharding_strategy": "SHARD_GRAD_OP"})
    assert isinstance(model.output.weight, DTensor)
    assert not isinstance(model, FSDPModule)
    _, model, _, _ = compare({**one, "sharding_strategy": "SHARD_GRAD_OP"}, mixed_precision="bf16", rtol=3e-2)
    _, model, _, _ = compare({**one, "mixed_precision_policy": "bf16"}, rtol=3e-2)
    run, model, _, _ = compare({**one, "sharding_strategy": "NO_SHARD"})
    assert not any(isinstance(weight, DTensor) for weight in model.parameters())
    if run.num_processes == 4:
        config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        _, model, _, _ = compare({**one, "sharding_strategy": "HYBRID_SHARD"}, parallelism_config=config)
        assert next(model.parameters()).device_mesh.shape == (2, 2)
    hosts = 2 if run.num_processes == 4 else 1
    before = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = str(run.num_processes // hosts)
    try:
        _, model, _, _ = compare({**one, "sharding_strategy": "HYBRID_SHARD"})
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = before or str(run.num_processes)
    assert next(model.parameters()).device_mesh.size() == run.num_processes
    assert next(model.parameters()).device_mesh.ndim == hosts
    with pytest.raises(ValueError, match="choose SHARDED_STATE_DICT or FULL_STATE_DICT"):
        accelerator({**one, "state_dict_type": "LOCAL_STATE_DICT"})


class Branches:
    """What makes a module with a layer that some passes leave out."""

    def __new__(cls) -> Any:
        import torch

        class Net(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.other, self.last = (torch.nn.Linear(6, 6) for _ in range(3))

            def forward(self, data: Any, with_other: bool = False) -> Any:
                hidden = torch.tanh(self.first(data))
                return self.last(self.other(hidden) if with_other else hidden)

        torch.manual_seed(0)
        return Net()


def rows(run: Any, seed: int) -> tuple[Any, Any]:
    """A batch for all, and the part of this process."""
    import torch

    batch = torch.randn(2 * run.num_processes, 6, generator=torch.Generator().manual_seed(seed))
    return batch, batch.chunk(run.num_processes)[run.process_index]


def same_gradients(model: Any, expected: Any) -> None:
    import torch

    for (name, weight), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (weight.grad is None) == (other.grad is None), name
        if weight.grad is not None:
            torch.testing.assert_close(weight.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-6, msg=name)


WHOLE = {"auto_wrap_policy": "no_wrap", "transformer_cls_names_to_wrap": None}


@scenario
def a_layer_that_no_rank_uses_and_one_that_is_frozen_have_no_gradients() -> None:
    run = accelerator(WHOLE)
    model, expected = Branches(), Branches()
    for one in (model, expected):
        one.last.bias.requires_grad_(False)
    model, _ = run.prepare(model, sgd(model.parameters()))
    for seed in (1, 2):  # in the second pass, gradients are added to those of the first
        batch, own = rows(run, seed)
        run.backward(model(own).square().mean())
        expected(batch).square().mean().backward()
    same_gradients(model, expected)


@scenario
def a_layer_that_one_rank_uses_has_its_share() -> None:
    if not is_zero():
        return  # torch wants all ranks to use the same
    run = accelerator(WHOLE)
    model, expected = Branches(), Branches()
    model, _ = run.prepare(model, sgd(model.parameters()))
    batch, own = rows(run, 1)
    run.backward(model(own, with_other=run.is_main_process).square().mean())
    parts = batch.chunk(run.num_processes)
    losses = [expected(part, with_other=rank == 0).square().mean() for rank, part in enumerate(parts)]
    (sum(losses) / len(losses)).backward()
    same_gradients(model, expected)


@scenario
def of_zero_layers_that_one_rank_uses_in_two_models() -> None:
    if not is_zero():
        return  # torch wants all ranks to use the same
    run = accelerator(WHOLE)
    for turned in (False, True):
        pair, expected = [Branches(), Branches()], [Branches(), Branches()]
        prepared = run.prepare(*reversed(pair)) if turned else run.prepare(*pair)
        first, second = reversed(prepared) if turned else prepared
        batch, own = rows(run, 1)
        run.backward(second(first(own), with_other=run.is_main_process).square().mean())
        losses = [
            expected[1](expected[0](part), with_other=rank == 0).square().mean()
            for rank, part in enumerate(batch.chunk(run.num_processes))
        ]
        (sum(losses) / len(losses)).backward()
        same_gradients(first, expected[0])
        same_gradients(second, expected[1])


@scenario
def of_zero_rows_of_zeros_are_no_cleared_gradients() -> None:
    if not is_zero():
        return
    import torch

    class Words(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.last = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 1)

        def forward(self, words: Any) -> Any:
            return self.last(self.embedding(words))

    run = accelerator(WHOLE)
    torch.manual_seed(0)
    model, expected = Words(), Words()
    expected.load_state_dict(model.state_dict())
    model, _ = run.prepare(model, sgd(model.parameters()))
    words_of_some = [torch.tensor([0, 1]), torch.tensor([6, 7])]  # in the rows of one rank each
    for set_to_none in (True, False):
        with run.no_sync(model):
            run.backward(model(words_of_some[0]).square().mean())
        run.backward(model(words_of_some[1]).square().mean())
        for part in words_of_some:
            expected(part).square().mean().backward()
        same_gradients(model, expected)
        model.zero_grad(set_to_none)
        expected.zero_grad(set_to_none)


@scenario
def of_zero_gradients_that_the_program_keeps_stay_as_they_are() -> None:
    if not is_zero():
        return
    run = accelerator(WHOLE)
    model = Branches()
    model, _ = run.prepare(model, sgd(model.parameters()))
    run.backward(model(rows(run, 1)[1]).square().mean())
    kept = model.first.weight.grad
    before = kept.full_tensor().clone()
    model.zero_grad()
    run.backward(model(rows(run, 2)[1]).square().mean())
    assert kept.full_tensor().equal(before)
    places = [one.rows.data_ptr() for one in run._session.strategy._gradients()[0]._averages]
    del kept
    for seed in (3, 4):
        model.zero_grad()
        run.backward(model(rows(run, seed)[1]).square().mean())
    assert places == [one.rows.data_ptr() for one in run._session.strategy._gradients()[0]._averages]


@scenario
def evaluation_between_the_passes_and_a_graph_that_is_kept() -> None:
    import torch

    run = accelerator(WHOLE)
    model, expected = Branches(), Branches()
    model, _ = run.prepare(model, sgd(model.parameters()))
    (batch, own), (other, own_other) = rows(run, 1), rows(run, 2)
    first = model(own).square().mean()
    with torch.no_grad():
        model(other)
    second = model(own_other).mean()
    run.backward(first, retain_graph=True)
    run.backward(first + second)
    (2 * expected(batch).square().mean() + expected(other).mean()).backward()
    same_gradients(model, expected)


@scenario
def a_penalty_of_the_weights_in_the_loss() -> None:
    if not is_zero():
        return  # torch loses gradients of shards themselves
    run = accelerator(WHOLE)
    model, expected = Branches(), Branches()
    model, _ = run.prepare(model, sgd(model.parameters()))
    batch, own = rows(run, 1)
    for before in (True, False):

        def penalty(one: Any) -> Any:
            found = one.first.weight.square().sum()
            return found.full_tensor() if hasattr(found, "full_tensor") else found

        early = penalty(model)
        loss = model(own).square().mean()
        run.backward(loss + (early if before else penalty(model)))
        (expected(batch).square().mean() + penalty(expected)).backward()
        same_gradients(model, expected)
        model.zero_grad()
        expected.zero_grad()


@scenario
def of_zero_local_gradients_are_cleared_by_the_optimizer() -> None:
    if not is_zero():
        return  # torch keeps them
    run = accelerator(WHOLE)
    model, expected = Branches(), Branches()
    model, optimizer = run.prepare(model, sgd(model.parameters()))
    for clear in (optimizer.zero_grad, model.zero_grad):
        with run.no_sync(model):
            run.backward(model(rows(run, 1)[1]).square().mean())
        clear()
        batch, own = rows(run, 2)
        run.backward(model(own).square().mean())
        expected.zero_grad()
        expected(batch).square().mean().backward()
        same_gradients(model, expected)
        optimizer.zero_grad()


def failing(data: Any) -> Any:
    """``data``, whose backward pass raises a KeyError."""
    import torch

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, data: Any) -> Any:
            return data * 1

        @staticmethod
        def backward(context: Any, *gradients: Any) -> Any:
            raise KeyError("in the backward pass")

    return Failing.apply(data)


@scenario
def a_pass_that_failed_leaves_nothing() -> None:
    run = accelerator(WHOLE)
    model, expected = Branches(), Branches()
    model, _ = run.prepare(model, sgd(model.parameters()))
    for announced in (True, False) if is_zero() else (True,):  # torch does not notice by itself
        handle = model.first.register_forward_hook(lambda _, __, output: failing(output))
        loss = model(rows(run, 1)[1]).square().mean()
        with pytest.raises(KeyError):
            run.backward(loss) if announced else loss.backward()
        handle.remove()
        batch, own = rows(run, 2)
        loss = model(own).square().mean()
        run.backward(loss) if announced else loss.backward()
        expected.zero_grad()
        expected(batch).square().mean().backward()
        same_gradients(model, expected)
        model.zero_grad()


@scenario
def a_pass_that_fails_on_one_rank_fails_on_all_and_they_go_on() -> None:
    from accelerate_cpp.errors import PeerLost
    from accelerate_cpp.parallel.data_parallel import core_backend

    backend = core_backend()
    if backend is None or not backend.communicator.can_withdraw:
        return  # between hosts, and over other backends, the others wait
    run = accelerator(WHOLE)
    fails = run.process_index == 1
    for models in ([Branches()], [Branches(), Branches()]):
        expected = copy.deepcopy(models)
        models = [run.prepare(model, sgd(model.parameters()))[0] for model in models]
        for announced in (True, False) if is_zero() else (True,):  # torch does not notice by itself
            handle = models[0].first.register_forward_hook(lambda _, __, output: failing(output) if fails else output)
            loss = sum(model(rows(run, 1)[1]).square().mean() for model in models)
            handle.remove()
            with pytest.raises(KeyError if fails else PeerLost) as raised:
                run.backward(loss) if announced else loss.backward()
            if not fails:
                assert "rank 1 withdrew: its backward pass " in str(raised.value)
                assert ("KeyError" in str(raised.value)) == announced
            assert all(weight.grad is None for model in models for weight in model.parameters())
            batch, own = rows(run, 2)
            run.backward(sum(model(own).square().mean() for model in models))
            sum(model(batch).square().mean() for model in expected).backward()
            for model, plain in zip(models, expected, strict=True):
                same_gradients(model, plain)
                model.zero_grad()
                plain.zero_grad()


@scenario
def of_zero_a_pass_that_fails_before_it_comes_to_the_model_loses_what_had_accumulated() -> None:
    from accelerate_cpp.errors import PeerLost
    from accelerate_cpp.parallel.data_parallel import core_backend

    backend = core_backend()
    if not is_zero() or backend is None or not backend.communicator.can_withdraw:
        return
    run = accelerator(WHOLE)
    fails = run.process_index == 1
    model, _ = run.prepare(model := Branches(), sgd(model.parameters()))
    run.backward(model(rows(run, 0)[1]).square().mean())
    loss = model(rows(run, 1)[1]).square().mean()
    with pytest.raises(KeyError if fails else PeerLost):
        run.backward(failing(loss) if fails else loss)
    assert all(weight.grad is None for weight in model.parameters())


@scenario
def of_zero_layers_are_frozen_and_thawed_around_forward_passes() -> None:
    if not is_zero():
        return
    run = accelerator(WHOLE)
    model, expected = Branches(), Branches()
    model, _ = run.prepare(model, sgd(model.parameters()))
    batch, own = rows(run, 1)
    for before, after in ((True, True), (False, True), (True, False), (False, False), (True, True)):
        for layers, data in ((model, own), (expected, batch)):
            layers.zero_grad()
            layers.last.requires_grad_(before)
            loss = layers(data).square().mean()
            layers.last.requires_grad_(after)
            run.backward(loss) if layers is model else loss.backward()
        same_gradients(model, expected)
    model.requires_grad_(False)
    if run.is_main_process:
        model(own)  # alone


@scenario
def of_zero_weights_that_are_larger_than_buckets_and_a_penalty_accumulate() -> None:
    if not is_zero():
        return
    from accelerate_cpp.parallel.sharded import scattered_gradients

    run = accelerator(WHOLE)
    for bytes_of_buckets in (1, 300):
        model, expected = Branches(), Branches()
        scattered_gradients._BUCKET_BYTES, before = bytes_of_buckets, scattered_gradients._BUCKET_BYTES
        try:
            model, optimizer = run.prepare(model, sgd(model.parameters()))
        finally:
            scattered_gradients._BUCKET_BYTES = before
        plain = sgd(expected.parameters())
        for step in range(3):
            for micro in range(3):
                batch, own = rows(run, 3 * step + micro)
                loss = model(own, with_other=micro != 1).square().mean()
                run.backward(loss + sum(weight.square().sum().full_tensor() for weight in model.parameters()))
                loss = expected(batch, with_other=micro != 1).square().mean()
                (loss + sum(weight.square().sum() for weight in expected.parameters())).backward()
                same_gradients(model, expected)
            optimizer.step()
            optimizer.zero_grad()
            plain.step()
            plain.zero_grad()
        same_weights(run, model, expected)


@scenario
def weights_that_the_program_changes_are_those_of_the_next_pass() -> None:
    import time

    import torch

    run = accelerator(WHOLE)
    model = Branches()
    model, optimizer = run.prepare(model, sgd(model.parameters()))
    optimizer.step()
    if run.process_index == 1:
        time.sleep(0.3)  # the others must not compute with what it is about to change
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        assert model(rows(run, 1)[1]).abs().max() == 0


@scenario
def weights_that_an_optimizer_changes_with_its_mode() -> None:
    import time

    import torch

    class WithModes(torch.optim.SGD):
        def eval(self) -> None:
            with torch.no_grad():
                for weight in self.param_groups[0]["params"]:
                    weight.mul_(0)

        def train(self) -> None: ...

    run = accelerator(WHOLE)
    model = Branches()
    model, optimizer = run.prepare(model, WithModes(model.parameters(), lr=0.1))
    optimizer.step()
    if run.process_index == 1:
        time.sleep(0.3)  # the others must not compute with what it is about to change
    optimizer.eval()
    with torch.no_grad():
        assert model(rows(run, 1)[1]).abs().max() == 0


@scenario
def checkpoints_of_activations_inside_each_other() -> None:
    from torch.utils.checkpoint import checkpoint

    run = accelerator(WHOLE)
    model, expected = Branches(), Branches()
    first = model.first
    model, _ = run.prepare(model, sgd(model.parameters()))
    plain = first.forward
    first.forward = lambda data: checkpoint(plain, data, use_reentrant=False)
    batch, own = rows(run, 1)
    run.backward(checkpoint(model, own, use_reentrant=False).square().mean())
    expected(batch).square().mean().backward()
    same_gradients(model, expected)


@scenario
def weights_that_are_no_floating_numbers() -> None:
    import torch

    run = accelerator(WHOLE)
    model, expected = Branches(), Branches()
    for one in (model, expected):
        one.codes = torch.nn.Parameter(torch.arange(12, dtype=torch.int8).view(4, 3), requires_grad=False)
    model, _ = run.prepare(model, sgd([weight for weight in model.parameters() if weight.requires_grad]))
    batch, own = rows(run, 1)
    run.backward(model(own).square().mean())
    expected(batch).square().mean().backward()
    same_gradients(model, expected)
    assert torch.equal(model.codes.full_tensor(), expected.codes)


@scenario
def of_zero_no_rank_holds_all_gradients_at_once() -> None:
    if not is_zero():
        return
    from accelerate_cpp.parallel.sharded import scattered_gradients

    run = accelerator()
    scattered_gradients._BUCKET_BYTES, before = 1, scattered_gradients._BUCKET_BYTES
    try:
        model, _ = run.prepare(decoder(), sgd(decoder().parameters()))
    finally:
        scattered_gradients._BUCKET_BYTES = before
    leaves = list(run._session.strategy.leaves(model))
    most = 0

    def look(_: Any) -> None:
        nonlocal most
        most = max(most, sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None))

    for leaf in leaves:
        leaf.register_post_accumulate_grad_hook(look)
    whole = sum(leaf.nbytes for leaf in leaves)
    for _ in range(2):
        run.backward(loss_of(model, words(0, run.process_index)))
        assert all(leaf.grad is None for leaf in leaves)
    assert most < whole / 2


@scenario
def gradients_are_cleared_by_the_model_as_by_the_optimizer() -> None:
    run = accelerator()
    model, expected = decoder(), decoder()
    model, optimizer = run.prepare(model, sgd(model.parameters()))
    plain = sgd(expected.parameters())
    for step in range(3):
        import torch

        loss = loss_of(model, words(step, run.process_index))
        model.zero_grad()  # here, as some loops do
        run.backward(loss)
        optimizer.step()
        plain.zero_grad()
        loss_of(expected, torch.cat([words(step, share) for share in range(run.num_processes)])).backward()
        plain.step()
    same_weights(run, model, expected)


def run_scenarios(backend: str, environment: dict[str, str], *names: str) -> dict[str, str]:
    """Those of these names, or all."""
    os.environ.update(environment)
    return failures_of({name: SCENARIOS[name] for name in names or SCENARIOS}, backend)


LONG = pytest.mark.long


@pytest.fixture(
    scope="module",
    params=[
        (2, "shm", GATHERED),
        (3, "shm", ZERO_2),
        *(pytest.param((2, "shm", way), marks=LONG) for way in (ONCE_PER_HOST, ZERO_2)),
        *(pytest.param((*one, GATHERED), marks=LONG) for one in [(3, "shm"), (2, "gloo"), (4, "shm"), (4, "gloo")]),
        *(
            pytest.param((ranks, backend, way), marks=LONG)
            for ranks, backend in [(3, "shm"), (2, "gloo"), (4, "shm"), (4, "gloo")]
            for way in (ONCE_PER_HOST, ZERO_1, ZERO_2, ZERO_3)
            if (ranks, way) != (3, ZERO_2)
        ),
    ],
    ids=lambda param: f"{param[0]} ranks over {param[1]}, {way_of(param[2])}",
)
def failures(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    ranks, backend, way = request.param
    return run_processes(run_scenarios, ranks, backend, way, timeout=280)


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_every_rank(failures: list[dict[str, str]], name: str) -> None:
    report = [f"rank {rank}: {own[name]}" for rank, own in enumerate(failures) if name in own]
    assert not report, "\n".join(report)


def test_processes_of_a_host_that_have_the_weights_in_common_train() -> None:
    names = ("what_the_host_has_in_common_is_what_all_step_on", "losses_and_weights_with_sgd")
    assert run_processes(run_scenarios, 2, "shm", ONCE_PER_HOST, *names, timeout=280) == [{}] * 2


def run_scenarios_on_a_host(hosts: tuple[Host, Host], layout: tuple[int, ...], way: dict[str, str]) -> dict[str, str]:
    hosts[layout[int(os.environ["RANK"])]].enter()
    failures = run_scenarios("shm", way)
    import torch.distributed as dist

    outlive_the_others(dist.distributed_c10d._get_default_store(), dist.get_rank(), len(layout))
    return failures


@pytest.mark.long
@pytest.mark.parametrize("way", [GATHERED, ONCE_PER_HOST, ZERO_1, ZERO_2, ZERO_3], ids=lambda way: way_of(way))
@pytest.mark.parametrize("layout", [(0, 1), (0, 0, 1, 1), (0, 0, 1)], ids=str)
def test_on_two_hosts(hosts: tuple[Host, Host], layout: tuple[int, ...], way: dict[str, str]) -> None:
    environment = {"MASTER_ADDR": ADDRESSES[0]}
    arguments = (hosts, layout, way)
    failures = run_processes(run_scenarios_on_a_host, len(layout), *arguments, timeout=280, environment=environment)
    assert failures == [{}] * len(layout), "\n".join(text for own in failures for text in own.values())
