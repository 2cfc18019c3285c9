"""``accelerate-cpp estimate-memory``: how much memory a model needs, loaded and in training, without loading it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.commands.launch import run_command
from accelerate_cpp.commands.utils import CustomArgumentParser, command_parser, integer_from
from accelerate_cpp.placement import memory_report

if TYPE_CHECKING:
    from accelerate_cpp.comm.mesh import Mesh
    from accelerate_cpp.parallel.costs.steps import Step
    from accelerate_cpp.placement.empty_models import EmptyModel

__getattr__ = lending("commands.estimate")

_DTYPES = ["float32", "float16", "int8", "int4"]
_OPTIMIZERS = ("adam", "adamw", "sgd", "sgd_momentum")
_AXES = ("dp_replicate", "dp_shard", "tp", "cp", "sp", "pp")
_ATTENTIONS = ("allgather", "alltoall", "ulysses")
_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


def estimate_command_parser(
    subparsers: argparse._SubParsersAction[CustomArgumentParser] | None = None,
) -> CustomArgumentParser:
    """The parser of the command, by itself or as one of ``subparsers``."""
    description = "Show how much memory a model needs, loaded and in training, without loading it."
    parser = command_parser(subparsers, "estimate-memory", description)
    parser.add_argument(
        "model_name", type=str, help="a folder with config.json, such a file, or a name on the Hugging Face Hub"
    )
    parser.add_argument(
        "--library_name",
        type=str,
        choices=["timm", "transformers"],
        help="library of the model; default: as config.json says",
    )
    parser.add_argument("--dtypes", type=str, nargs="+", choices=_DTYPES, default=_DTYPES, help="dtypes of the weights")
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="run code from the model's repository; read it first"
    )
    _add_training_flags(parser)
    _add_mesh_flags(parser)
    parser.set_defaults(func=estimate_command)
    return parser


def _add_training_flags(parser: CustomArgumentParser) -> None:
    section = parser.add_argument_group("training", "Weights, gradients, optimizer states and activations.")
    section.add_argument(
        "--batch_size",
        type=integer_from(1),
        default=1,
        metavar="N",
        help="samples per batch; with --parallelism, per micro-batch",
    )
    section.add_argument(
        "--sequence_length",
        type=integer_from(1),
        metavar="N",
        help="tokens per sample; default: 512, or the maximum of the model if that is less",
    )
    section.add_argument("--optimizer", choices=_OPTIMIZERS, default="adam", help="default: adam")
    section.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="device whose kernels save activations; default: cuda if there is a GPU",
    )
    section.add_argument(
        "--model_class", metavar="NAME", help="class of transformers, such as AutoModel; default: as config.json says"
    )
    section.add_argument("--picture", metavar="FILE", help="also draw the bars in this file, such as memory.png")


def _add_mesh_flags(parser: CustomArgumentParser) -> None:
    section = parser.add_argument_group(
        "several processes", "What each holds and sends, for decoders of transformers (docs/planning.md)."
    )
    section.add_argument(
        "--parallelism", metavar="SIZES", help='sizes of a ParallelismConfig, such as "dp_shard=4,tp=8,pp=4"'
    )
    section.add_argument(
        "--sequence_parallel", action="store_true", help="of tp: norms and residuals are computed for parts of tokens"
    )
    section.add_argument(
        "--loss_parallel", action="store_true", help="of tp: logits stay split, and losses are computed of the parts"
    )
    section.add_argument(
        "--cp_comm_strategy", choices=_ATTENTIONS, default="allgather", help="of cp; default: allgather"
    )
    section.add_argument(
        "--micro_batches",
        type=integer_from(1),
        metavar="N",
        help="per step and process; default: 2 for each process along pp, 1 without pp",
    )
    section.add_argument("--pp_schedule", type=str.lower, choices=_SCHEDULES, default="1f1b", help="default: 1f1b")
    section.add_argument("--clip", action="store_true", help="gradients are clipped by their norm")
    section.add_argument(
        "--ranks_per_host", type=integer_from(1), default=8, metavar="N", help="neighbouring ranks; default: 8"
    )
    for name, default, what in (
        ("bandwidth_within", 400.0, "GB/s that each rank can send to others of its host"),
        ("bandwidth_between", 50.0, "GB/s that each rank can send to other hosts"),
        ("latency_within", 2.0, "microseconds of a message within a host"),
        ("latency_between", 5.0, "microseconds of a message between hosts"),
    ):
        section.add_argument(
            f"--{name}", type=float, default=default, metavar="X", help=f"{what}; default: {default:g}"
        )


def estimate_command(args: argparse.Namespace) -> int:
    """Prints the estimate for ``args``."""
    if args.parallelism is not None:
        if args.picture is not None:
            raise _no_picture()
        print(mesh_text(args))
        return 0
    picture = None if args.picture is None else memory_report.checked_picture(Path(args.picture).expanduser())
    report = _report(args)
    print(memory_report.text(report))
    if picture is not None:
        memory_report.draw(report, picture)
        print(f"accelerate-cpp estimate-memory: wrote {picture}")
    return 0


def add_timm_hub_prefix(model_name: str) -> str:
    """The name with which timm finds a model: ``hf-hub:`` is added to names on the Hub (with a slash and no source)."""
    return f"hf-hub:{model_name}" if "/" in model_name and ":" not in model_name else model_name


def verify_on_hub(repo: str, token: str | None = None) -> Any:
    """The Hub's information on ``repo``; ``"repo"`` if it does not exist, ``"gated"`` if ``token`` has no access to it.

    ``"gated"`` is also returned if the Hub cannot be reached.
    """
    from huggingface_hub import model_info  # imported here, because the import takes a while
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return model_info(repo, token=token)
    except GatedRepoError:
        return "gated"
    except RepositoryNotFoundError:
        return "repo"
    except OSError:
        return "gated"


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """The estimate for ``args``, in bytes.

    Returns:
        For each dtype a list: its name, the largest layer, the whole model, and the parts of training by their names,
        ``None`` if they are unknown; empty for dtypes in which models are not trained.
    """
    report = _report(args)
    return [
        [dtype, layer, total, dict(report.training.get(dtype, {}))] for dtype, (layer, total) in report.stored.items()
    ]


def mesh_text(args: argparse.Namespace) -> str:
    """The report for ``args.parallelism``: what each rank holds, what it sends, and how long the pipeline waits.

    Raises:
        InvalidArgument: the sizes cannot be combined, or the model cannot be split or cut that way.
    """
    # Imported here, because they load torch.
    import torch

    from accelerate_cpp.parallel.costs.links import Links
    from accelerate_cpp.placement.mesh_memory import held_by_ranks
    from accelerate_cpp.placement.mesh_report import MeshReport, text

    in_16_bits = "float32" not in args.dtypes
    names = ("ranks_per_host", "bandwidth_within", "bandwidth_between", "latency_within", "latency_between")
    links = Links(**{name: getattr(args, name) for name in names})
    mesh = mesh_from(args.parallelism)
    device = _device(args.device)
    model = _empty_model(args)
    step = _step(args, mesh, model.tokens, 2 if in_16_bits else 4)
    dtype = torch.float16 if in_16_bits else None
    stages, held = held_by_ranks(model.module, mesh, step, args.optimizer, dtype, device)
    precision = "float16 (mixed precision)" if in_16_bits else "float32"
    return text(MeshReport(args.model_name, model.title, precision, args.optimizer, mesh, step, links, stages, held))


def mesh_from(sizes: str) -> Mesh:
    """The mesh of rank 0, from sizes such as ``"dp_shard=4,tp=8"``.

    Raises:
        InvalidArgument: there is no such axis, a size is no positive integer, or the sizes cannot be combined.
    """
    from accelerate_cpp.comm.mesh import Mesh
    from accelerate_cpp.errors import InvalidArgument
    from accelerate_cpp.plugins.combinations import require_legal
    from accelerate_cpp.plugins.fsdp import FullyShardedDataParallelPlugin
    from accelerate_cpp.plugins.parallelism_config import ParallelismConfig

    found = dict.fromkeys(_AXES, 1)
    for part in filter(None, (part.strip() for part in sizes.split(","))):
        name, _, size = (word.strip() for word in part.partition("="))
        name = name.removesuffix("_size")
        if name not in found or not size.isdecimal() or int(size) < 1:
            raise InvalidArgument(
                f"--parallelism {sizes!r}: {part!r}; expected a size, 1 or more, of {', '.join(_AXES)}, such as "
                "dp_shard=4,tp=8"
            )
        found[name] = int(size)
    config = ParallelismConfig(**{f"{name}_size": size for name, size in found.items()})  # type: ignore[arg-type]
    sharding = FullyShardedDataParallelPlugin(fsdp_version=2) if found["dp_shard"] > 1 else None
    require_legal(config, config.total_size, sharding)
    return Mesh(0, config.axes())


def _step(args: argparse.Namespace, mesh: Mesh, tokens: int, element_bytes: int) -> Step:
    from accelerate_cpp.parallel.costs.steps import Step
    from accelerate_cpp.parallel.pipeline.schedules import schedule_named

    stages, sharded = mesh.size("pp"), mesh.size("dp_shard") > 1
    micro_batches = args.micro_batches or (2 * stages if stages > 1 else 1)
    if stages > 1:
        schedule_named(args.pp_schedule).check(stages, micro_batches)
    return Step(
        rows=args.batch_size,
        tokens=tokens,
        micro_batches=micro_batches,
        element_bytes=element_bytes,
        weight_bytes=element_bytes if sharded else 4,  # of copies, gradients travel as optimizers use them
        sequence_parallel=args.sequence_parallel,
        loss_parallel=args.loss_parallel,
        attention=args.cp_comm_strategy,
        schedule=args.pp_schedule,
        sharded=sharded,
        clips=args.clip,
    )


def _no_picture() -> Exception:
    from accelerate_cpp.errors import InvalidArgument

    return InvalidArgument("--picture: there are no bars of a mesh to draw; leave --picture or --parallelism out")


def _empty_model(args: argparse.Namespace) -> EmptyModel:
    from accelerate_cpp.placement.empty_models import empty_model  # loads torch

    return empty_model(
        args.model_name,
        args.library_name,
        batch_size=args.batch_size,
        sequence_length=args.sequence_length,
        model_class=args.model_class,
        trust_remote_code=args.trust_remote_code,
    )


def _report(args: argparse.Namespace) -> memory_report.Report:
    # Imported here, because they load torch.
    from accelerate_cpp.placement import model_memory

    device = _device(args.device)
    model = _empty_model(args)
    sizes = {dtype: model_memory.model_size(model.module, dtype) for dtype in args.dtypes}
    training, failure = {}, None
    for dtype in ("float32", "float16"):
        if dtype in args.dtypes:
            activations, failure = _activations(model, dtype, device)
            training[dtype] = model_memory.training_memory(model.module, args.optimizer, activations)
    return memory_report.Report(
        args.model_name,
        model.title,
        sum(parameter.numel() for parameter in model.module.parameters()),
        f"{args.optimizer} and batches of {model.batch}, on kernels of {device}",
        {dtype: (size.largest_layer, size.total) for dtype, size in sizes.items()},
        {dtype: memory.parts() for dtype, memory in training.items()},
        failure,
    )


def _device(wanted: str | None) -> str:
    import torch

    from accelerate_cpp.errors import InvalidArgument

    if wanted == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument(
            "--device cuda: torch sees no GPU here, and the kernels of a GPU are only known where there is one"
        )
    return wanted or ("cuda" if torch.cuda.is_available() else "cpu")


def _activations(model: EmptyModel, dtype: str, device: str) -> tuple[int | None, str | None]:
    """The bytes, or ``None`` and the reason why a forward pass on tensors without data fails."""
    import torch

    from accelerate_cpp.placement import model_memory

    autocast = None if dtype == "float32" else getattr(torch, dtype)
    try:
        return model_memory.activation_bytes(model.module, model.make_inputs, autocast, device), None
    except Exception as error:  # the model's own code, which may read values that do not exist
        text = str(error).strip().splitlines()
        return None, f"{type(error).__name__}: {text[0] if text else ''}"


def main() -> int:
    """Entry point of ``python -m accelerate_cpp.commands.estimate``."""
    return run_command(estimate_command_parser())


if __name__ == "__main__":
    sys.exit(main())
