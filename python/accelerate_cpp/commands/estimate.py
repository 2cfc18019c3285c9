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
    from accelerate_cpp.placement.empty_models import EmptyModel

__getattr__ = lending("commands.estimate")

_DTYPES = ["float32", "float16", "int8", "int4"]
_OPTIMIZERS = ("adam", "adamw", "sgd", "sgd_momentum")


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
    parser.set_defaults(func=estimate_command)
    return parser


def _add_training_flags(parser: CustomArgumentParser) -> None:
    section = parser.add_argument_group("training", "Weights, gradients, optimizer states and activations.")
    section.add_argument("--batch_size", type=integer_from(1), default=1, metavar="N", help="samples per batch")
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


def estimate_command(args: argparse.Namespace) -> int:
    """Prints the estimate for ``args``."""
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


def _report(args: argparse.Namespace) -> memory_report.Report:
    # Imported here, because they load torch.
    from accelerate_cpp.placement import model_memory
    from accelerate_cpp.placement.empty_models import empty_model

    device = _device(args.device)
    model = empty_model(
        args.model_name,
        args.library_name,
        batch_size=args.batch_size,
        sequence_length=args.sequence_length,
        model_class=args.model_class,
        trust_remote_code=args.trust_remote_code,
    )
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
