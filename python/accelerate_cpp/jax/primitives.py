"""The collectives as primitives of JAX: custom calls of XLA in the order of the program, which can be differentiated.

An ordered effect chains the calls of all programs by tokens, so XLA neither reorders nor merges nor drops them, and
they come in the same order on every rank. JAX documents no way to define one: this module alone uses its private
modules, and says so if they have changed.

The rule of derivatives is that of ``torch.distributed.nn.functional``: the objective is the sum of what all ranks
differentiate, so that each collective has a collective as its transpose.
"""

from __future__ import annotations

import atexit
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from accelerate_cpp import _native, errors
from accelerate_cpp.comm.call_site import call_site
from accelerate_cpp.errors import InvalidArgument, MissingLibrary

OLDEST_JAX, FIRST_UNTESTED_JAX = (0, 7, 2), (0, 11)
_LINEAR = ("sum", "mean")
_PREFIX = "accelerate_cpp_"
_MOST_SHOWN = 3  # arrays in a message


def _private() -> tuple[Any, list[Any], Any, Any]:
    """JAX's effects, the sets of what is allowed for one, the aval of tokens, and the tokens of programs that run.

    Raises:
        MissingLibrary: this version of JAX does not have them where they are looked for.
    """
    try:
        from jax._src import core, dispatch, effects

        kinds = [
            effects.lowerable_effects,
            effects.ordered_effects,
            effects.control_flow_allowed_effects,
            effects.custom_derivatives_allowed_effects,
            effects.remat_allowed_effects,
        ]
        return effects, kinds, core.abstract_token, dispatch.runtime_tokens
    except (ImportError, AttributeError) as error:
        expected = ".".join(map(str, OLDEST_JAX)), ".".join(map(str, FIRST_UNTESTED_JAX))
        raise MissingLibrary(
            f"accelerate_cpp.jax: jax {jax.__version__} has other internals than expected ({error}); install one from "
            f"{expected[0]} to before {expected[1]}: pip install 'jax>={expected[0]},<{expected[1]}'"
        ) from error


_effects, _kinds, _abstract_token, _runtime_tokens = _private()


class _InOrder(_effects.Effect):  # type: ignore[misc,name-defined]
    """The effect of a collective: all of them happen one after the other."""

    def __str__(self) -> str:
        return "Collective"

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _InOrder)

    def __hash__(self) -> int:
        return hash(_InOrder)


_IN_ORDER = _InOrder()
for _kind in _kinds:
    _kind.add_type(_InOrder)


@cache
def register_targets() -> None:
    """Tells XLA the custom calls of the C++ module.

    Raises:
        MissingLibrary: it was built where jaxlib was not installed, or was newer.
    """
    handlers = _native.xla_handlers()
    if not handlers:
        raise MissingLibrary(
            "accelerate_cpp.jax needs a C++ module that was built where jaxlib was installed, for its header: run "
            "`accelerate-cpp rebuild --force` here"
        )
    for name, handler in handlers.items():
        try:
            jax.ffi.register_ffi_target(_target(name), handler, platform="cpu")
        except RuntimeError as error:
            raise MissingLibrary(
                f"accelerate_cpp.jax: jax {jax.__version__} does not take the custom calls of the C++ module, which "
                "was built for another jaxlib, or for a newer one: run `accelerate-cpp rebuild --force` here"
            ) from error
    atexit.register(_wait_at_exit)


def _wait_at_exit() -> None:
    """A program that ends well may leave collectives under way, which the other ranks need. One that ends with an error
    leaves the groups at once: JAX waits at exit, too, and what it waits for may need a rank that does not come.
    """
    error = getattr(sys, "last_value", None)
    if error is None:
        wait_for_programs()
        return
    _native.leave_groups(error)
    with suppress(jax.errors.JaxRuntimeError):  # the program has ended with an error of its own
        jax.effects_barrier()
    _runtime_tokens.clear()


def _target(name: str) -> str:
    return f"{_PREFIX}{name}"


_KINDS = re.compile(
    r"\b(PeerLost|Timeout|MismatchedCollective|InvalidArgument|SystemFailure|InternalError|KeyboardInterrupt): (.*)",
    re.DOTALL,
)


@contextmanager
def translated() -> Iterator[None]:
    """Raises errors of a collective that XLA passes on as text as the types of :mod:`accelerate_cpp.errors`.

    Programs that are run next do not wait for the failed one, so that a caller can go on after an error that leaves the
    group usable.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        found = _KINDS.search(str(error))
        if found is None:
            raise
        _runtime_tokens.clear()
        kind, text = found.groups()
        if kind == "KeyboardInterrupt":
            raise KeyboardInterrupt from None
        raise _error(kind, text) from None


def _error(kind: str, text: str) -> Exception:
    if kind == "SystemFailure":
        return errors.SystemFailure(0, text)
    made: type[Exception] = getattr(errors, kind)
    return made(text)


def wait_for_programs() -> None:
    """Returns when all collectives of programs that this thread has started have ended.

    Raises:
        AccelerateError: one of them failed.
    """
    with translated():
        jax.effects_barrier()


def _run(primitive: Any, *operands: Any, **params: Any) -> Any:
    """Outside of any program, a collective is a program by itself, even where JAX is told to compile none."""
    compiled = _compiled(primitive, tuple(sorted(params.items())))
    with jax.disable_jit(False) if jax.config.jax_disable_jit else nullcontext():
        return compiled(*operands)


@cache
def _compiled(primitive: Any, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = jax.jit(partial(primitive.bind, **dict(params)))
    return compiled


def _defined(
    name: str,
    shape: Callable[..., tuple[int, ...]],
    jvp: Callable[..., None] | None = None,
    aliases: bool = True,
    attributes: Sequence[str] = (),
) -> Any:
    """A primitive with as many results as operands.

    Args:
        name: of the handler, and of the primitive.
        shape: the shape of a result, from that of its operand and the parameters.
        jvp: raises where the parameters do not let it be differentiated.
        aliases: whether results may lie where the operands are.
        attributes: the parameters that the handler takes.
    """
    primitive = Primitive(_target(name))
    primitive.multiple_results = True
    primitive.def_impl(partial(_run, primitive))

    def abstract(*avals: Any, **params: Any) -> tuple[list[Any], set[Any]]:
        for aval in avals:
            _require_whole_bytes(name, aval.dtype)
        return [jax.core.ShapedArray(shape(aval.shape, **params), aval.dtype) for aval in avals], {_IN_ORDER}

    primitive.def_effectful_abstract_eval(abstract)

    def lower(ctx: Any, *operands: Any, **params: Any) -> Sequence[Any]:
        count = len(operands)
        chained = ctx.replace(avals_in=[_abstract_token, *ctx.avals_in], avals_out=[_abstract_token, *ctx.avals_out])
        lowering = jax.ffi.ffi_lowering(
            _target(name),
            has_side_effect=True,
            operand_output_aliases={index: index for index in range(1, count + 1)} if aliases else None,
        )
        given = {key: params[key] for key in attributes} | {"group": params["group"], "site": params["site"]}
        results: list[Any]
        token, *results = lowering(chained, ctx.tokens_in.get(_IN_ORDER), *operands, **_attributes(given))
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({_IN_ORDER: token})))
        return results

    mlir.register_lowering(primitive, lower, platform="cpu")

    def differentiate(primals: Any, tangents: Any, **params: Any) -> tuple[list[Any], list[Any]]:
        if jvp is not None:
            jvp(**params)
        results = primitive.bind(*primals, **params)
        moving = [index for index, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
        moved = primitive.bind(*(tangents[index] for index in moving), **params) if moving else []
        out: list[Any] = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
        for index, tangent in zip(moving, moved, strict=True):
            out[index] = tangent
        return results, out

    ad.primitive_jvps[primitive] = differentiate
    return primitive


def _require_whole_bytes(name: str, dtype: Any) -> None:
    """Parts of ranks lie behind each other, which elements that share a byte cannot.

    Raises:
        InvalidArgument: elements of ``dtype`` have less than 8 bits.
    """
    if jnp.issubdtype(dtype, jnp.integer):
        bits = jnp.iinfo(dtype).bits
    elif jnp.issubdtype(dtype, jnp.floating):
        bits = jnp.finfo(dtype).bits
    else:
        return
    if bits < 8:
        raise InvalidArgument(f"{name} of {dtype}: expected elements of at least 8 bits; convert the array first")


def _attributes(params: dict[str, Any]) -> dict[str, Any]:
    return {key: np.int64(value) if isinstance(value, int) else value for key, value in params.items()}


def _only_linear(*, op: str, **_params: Any) -> None:
    if op not in _LINEAR:
        raise InvalidArgument(
            f"op={op!r} cannot be differentiated: expected 'sum' or 'mean'; jax.lax.stop_gradient around the operand "
            "says that it need not be"
        )


def _same_shape(shape: tuple[int, ...], **_params: Any) -> tuple[int, ...]:
    return shape


def _gathered_shape(shape: tuple[int, ...], *, world_size: int, tiled: bool, **_params: Any) -> tuple[int, ...]:
    return (world_size * shape[0], *shape[1:]) if tiled else (world_size, *shape)


def _scattered_shape(shape: tuple[int, ...], *, world_size: int, tiled: bool, **_params: Any) -> tuple[int, ...]:
    return (shape[0] // world_size, *shape[1:]) if tiled else shape[1:]


all_reduce_p = _defined("all_reduce", _same_shape, _only_linear, attributes=("op",))
reduce_p = _defined("reduce", _same_shape, _only_linear, attributes=("op", "root"))
broadcast_p = _defined("broadcast", _same_shape, attributes=("root",))
all_gather_p = _defined("all_gather", _gathered_shape, aliases=False)
reduce_scatter_p = _defined("reduce_scatter", _scattered_shape, _only_linear, aliases=False, attributes=("op",))
barrier_p = _defined("barrier", _same_shape)


def _transposed(primitive: Any, back: Callable[..., Sequence[Any]]) -> None:
    """``back`` takes the cotangents of results that have one, and the parameters."""

    def transpose(cotangents: Any, *operands: Any, **params: Any) -> list[Any]:
        moving = [index for index, cotangent in enumerate(cotangents) if type(cotangent) is not ad.Zero]
        moved = back([cotangents[index] for index in moving], **params) if moving else []
        out: list[Any] = [None] * len(operands)
        for index, cotangent in zip(moving, moved, strict=True):
            out[index] = cotangent
        return out

    ad.primitive_transposes[primitive] = transpose


def _scaled(cotangents: Sequence[Any], op: str, world_size: int) -> list[Any]:
    return [cotangent / world_size if op == "mean" else cotangent for cotangent in cotangents]


_transposed(all_reduce_p, lambda cotangents, **params: all_reduce_p.bind(*cotangents, **params))
_transposed(broadcast_p, lambda cotangents, **params: reduce_p.bind(*cotangents, op="sum", **params))
_transposed(
    reduce_p,
    lambda cotangents, *, op, world_size, **params: _scaled(
        broadcast_p.bind(*cotangents, world_size=world_size, **params), op, world_size
    ),
)
_transposed(all_gather_p, lambda cotangents, **params: reduce_scatter_p.bind(*cotangents, op="sum", **params))
_transposed(
    reduce_scatter_p,
    lambda cotangents, *, op, world_size, **params: _scaled(
        all_gather_p.bind(*cotangents, world_size=world_size, **params), op, world_size
    ),
)


def _each_alike(primitive: Any, args: Any, dims: Any, **params: Any) -> tuple[Any, Any]:
    return primitive.bind(*args, **params), dims


def _gathered_batch(args: Any, dims: Any, *, tiled: bool, **params: Any) -> tuple[Any, Any]:
    if not tiled:
        moved, out = list(args), [dim if dim is None else dim + 1 for dim in dims]
    else:
        moved, out = _batch_last(args, dims)
    return all_gather_p.bind(*moved, tiled=tiled, **params), out


def _scattered_batch(args: Any, dims: Any, *, tiled: bool, **params: Any) -> tuple[Any, Any]:
    moved, out = _batch_last(args, dims)
    if not tiled:
        out = [dim if dim is None else dim - 1 for dim in out]
    return reduce_scatter_p.bind(*moved, tiled=tiled, **params), out


def _batch_last(args: Any, dims: Any) -> tuple[list[Any], list[Any]]:
    """Dimension 0, along which ranks differ, stays where it is."""
    mapped = [dim is not None for dim in dims]
    moved = [
        jnp.moveaxis(arg, dim, -1) if is_mapped else arg for arg, dim, is_mapped in zip(args, dims, mapped, strict=True)
    ]
    return moved, [arg.ndim - 1 if is_mapped else dim for arg, dim, is_mapped in zip(moved, dims, mapped, strict=True)]


for _primitive in (all_reduce_p, reduce_p, broadcast_p, barrier_p):
    batching.primitive_batchers[_primitive] = partial(_each_alike, _primitive)
batching.primitive_batchers[all_gather_p] = _gathered_batch
batching.primitive_batchers[reduce_scatter_p] = _scattered_batch


def _site(primitive: Any, operands: Sequence[Any]) -> str:
    """Where the program called a collective: when that runs, the program may be elsewhere. Several arrays travel as
    one, so what they were is said here.
    """
    place = call_site().rpartition("\t")[2]
    if len(operands) < 2:
        return place
    shown = ", ".join(f"{operand.dtype} {operand.shape}" for operand in operands[:_MOST_SHOWN])
    rest = ", …" if len(operands) > _MOST_SHOWN else ""
    return f"{primitive.name.removeprefix(_PREFIX)} of {len(operands)} arrays: {shown}{rest}\t{place}"


def bind(primitive: Any, operands: Sequence[Any], group: int, world_size: int, **params: Any) -> list[Any]:
    """The results of a collective, in a program that is traced or at once.

    Args:
        group: its number for the C++ module.

    Raises:
        AccelerateError: outside of a program, what the collective raises.
    """
    register_targets()
    site = _site(primitive, operands)
    with translated():
        results = primitive.bind(*operands, group=group, world_size=world_size, site=site, **params)
        if not any(isinstance(result, jax.core.Tracer) for result in results):
            jax.block_until_ready(results)
            if not results:
                jax.effects_barrier()
    return list(results)
