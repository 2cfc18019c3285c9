"""Models of transformers and timm without data, from a configuration on this machine or on the Hugging Face Hub."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate_cpp.config.text import parsed_json, shortened
from accelerate_cpp.errors import InvalidArgument, MissingLibrary, Unavailable
from accelerate_cpp.placement.model_memory import Inputs

LIBRARIES = ("timm", "transformers")
_USUAL_LENGTH = 512
_PATIENCE_SECONDS = 10
# Names of classes whose labels are one number for each token; other classifiers have one for each sample.
_LABELS_OF_TOKENS = ("CausalLM", "MaskedLM", "LMHeadModel", "ConditionalGeneration", "TokenClassification")


@dataclass(frozen=True)
class EmptyModel:
    """A model on the meta device, in float32 and in training mode.

    Attributes:
        title: its class and its library.
        make_inputs: makes the arguments of a forward pass, with the loss where the model computes one.
        batch: what these are, in words.
        tokens: of a sample; 0 where there are none.
    """

    module: nn.Module
    title: str
    make_inputs: Callable[[], Inputs]
    batch: str
    tokens: int = 0


def empty_model(
    name: str,
    library: str | None = None,
    *,
    batch_size: int = 1,
    sequence_length: int | None = None,
    model_class: str | None = None,
    trust_remote_code: bool = False,
) -> EmptyModel:
    """The model with the name ``name``.

    Args:
        name: a folder with ``config.json``, such a file, a name on the Hub, or an architecture of timm.
        library: one of ``LIBRARIES``; by default the one that the configuration is for.
        sequence_length: tokens of a sample; by default 512, or what the model can take if that is less.
        model_class: of transformers; by default the one that the configuration names.

    Raises:
        Unavailable: there is no such model, or the Hub does not give it.
        InvalidArgument: its library cannot build it.
        MissingLibrary: a Python package is needed for it.
    """
    with _quiet():
        return _found(name, library, batch_size, sequence_length, model_class, trust_remote_code)


def _found(
    name: str,
    library: str | None,
    batch_size: int,
    sequence_length: int | None,
    model_class: str | None,
    trust_remote_code: bool,
) -> EmptyModel:
    if library == "timm" and "/" not in name and not Path(name).exists():
        return _of_timm(name, batch_size)
    path = _configuration(name)
    library = library or _library_of(name, path)
    local = Path(name).expanduser().exists()
    if library == "timm":
        source = f"local-dir:{path.parent}" if local else f"hf-hub:{name}"
        return _of_timm(source, batch_size)
    # Code next to the configuration is only found through the name.
    source = name if trust_remote_code else str(path)
    return _of_transformers(source, batch_size, sequence_length, model_class, trust_remote_code)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps libraries from logging what they lack: everything relevant is raised here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _configuration(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise InvalidArgument(f"{name}: the folder has no config.json")
    return path if path.is_file() else _downloaded(name)


def _downloaded(name: str) -> Path:
    """The configuration from the cache, else from the Hub, after a short request: a download retries for long."""
    _require("huggingface_hub", name)
    from huggingface_hub import HfApi, errors, hf_hub_download

    nothing_here = f"{name} is neither a folder nor a file here"
    try:
        return Path(hf_hub_download(name, "config.json", local_files_only=True))
    except errors.HFValidationError:
        raise Unavailable(f"{nothing_here}, and this is not a valid name on the Hub") from None
    except errors.LocalEntryNotFoundError:
        pass
    try:
        HfApi().model_info(name, timeout=_PATIENCE_SECONDS)
        return Path(hf_hub_download(name, "config.json"))
    except errors.GatedRepoError as error:
        raise Unavailable(f"{name} is gated: accept its terms on the Hub, and log in by `hf auth login`") from error
    except errors.RepositoryNotFoundError as error:
        raise Unavailable(
            f"{nothing_here}, nor is it on the Hub; for one of your own log in by `hf auth login`, for an "
            "architecture of timm pass --library_name timm"
        ) from error
    except Exception as error:  # what a connection raises depends on the library that is used for it
        if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
            raise Unavailable(f"{name} has no config.json on the Hub, so its model is not known") from error
        raise Unavailable(
            f"{nothing_here} nor in the cache, and the Hub cannot be reached ({_first_line(error)}); pass a folder "
            "with its config.json"
        ) from error


def _library_of(name: str, path: Path) -> str:
    try:
        content = parsed_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path} cannot be read as a model's configuration ({error})") from error
    if isinstance(content, dict) and "model_type" in content:
        return "transformers"
    if isinstance(content, dict) and "architecture" in content:
        return "timm"
    raise InvalidArgument(f"{name}: {path.name} does not say for which library it is: pass --library_name")


def _require(package: str, name: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingLibrary(
            f"{name}: this needs the Python package {package}, which is not installed: pip install {package}"
        )


def _of_timm(source: str, batch_size: int) -> EmptyModel:
    _require("timm", source)
    timm: Any = importlib.import_module("timm")  # an optional library, with no types here
    try:
        with torch.device("meta"):
            module = timm.create_model(source, pretrained=False).float().train()
    except Exception as error:
        raise InvalidArgument(f"{source}: timm cannot build it ({_first_line(error)})") from error
    size = _sizes(module.pretrained_cfg.get("input_size"), 3, source, "input_size")
    batch = f"{batch_size} x {'x'.join(map(str, size))} pixels"
    return EmptyModel(
        module, f"{type(module).__name__} of timm", lambda: ((torch.zeros(batch_size, *size),), {}), batch
    )


def _of_transformers(
    source: str, batch_size: int, sequence_length: int | None, model_class: str | None, trust_remote_code: bool
) -> EmptyModel:
    _require("transformers", source)
    transformers: Any = importlib.import_module("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise InvalidArgument(f"{source}: transformers cannot read its configuration ({_first_line(error)})") from error
    if not trust_remote_code:
        _require_own_kernels(source, config)
    build = _builder(transformers, config, model_class, trust_remote_code)
    length = _length(source, config, sequence_length)
    try:
        with torch.device("meta"):
            module = build(config).float().train()
    except Exception as error:
        raise InvalidArgument(f"{source}: transformers cannot build it ({_first_line(error)})") from error
    shape, batch = _main_input(module, config, batch_size, length)
    return EmptyModel(
        module,
        f"{type(module).__name__} of transformers",
        lambda: ((), _arguments(module, config, shape, (batch_size, length))),
        batch,
        length,
    )


def _builder(
    transformers: Any, config: Any, model_class: str | None, trust_remote_code: bool
) -> Callable[[Any], nn.Module]:
    """The class that the caller names, else the repository's own if that is trusted, else the configuration's."""
    own_code = [name for name in _names_in(config, "auto_map") if name.startswith("AutoModel")]
    names = [model_class] if model_class else own_code[-1:] if trust_remote_code else _names_in(config, "architectures")
    name = next((name for name in names if _makes_models(getattr(transformers, name, None), transformers)), None)
    if name is None and model_class:
        near = difflib.get_close_matches(model_class, dir(transformers), n=1, cutoff=0.3)
        raise InvalidArgument(
            f"--model_class {model_class}: transformers has no such class; the nearest is {(near or ['AutoModel'])[0]}"
        )
    chosen: Any = getattr(transformers, name or "AutoModel")
    if hasattr(chosen, "from_config"):  # one of the classes that look at the configuration
        return lambda config: chosen.from_config(config, trust_remote_code=trust_remote_code)
    return lambda config: chosen(config)


def _names_in(config: Any, entry: str) -> list[str]:
    names = getattr(config, entry, None)
    return [name for name in names if isinstance(name, str)] if isinstance(names, (list, tuple, Mapping)) else []


def _require_own_kernels(source: str, config: Any) -> None:
    for name in ("_attn_implementation", "_experts_implementation"):
        chosen = getattr(config, name, None)
        if "/" in str(chosen) or str(chosen).startswith("flash_"):  # which transformers may take from the Hub, too
            raise InvalidArgument(
                f"{source}: its configuration wants {shortened(chosen)} for {name.strip('_')!r}, which is code of the "
                "Hub: pass --trust_remote_code if you trust both, or take that entry out"
            )
    for name in getattr(config, "sub_configs", ()):
        _require_own_kernels(source, getattr(config, name, None))


def _makes_models(found: Any, transformers: Any) -> bool:
    if not inspect.isclass(found) or found is transformers.PreTrainedModel:
        return False
    # Classes whose library is missing raise where an attribute is asked for.
    return inspect.getattr_static(found, "from_config", None) is not None or issubclass(found, nn.Module)


def _sizes(value: Any, count: int, source: str, name: str) -> tuple[int, ...]:
    """``count`` positive integers, which a configuration has under ``name``."""
    is_list = isinstance(value, (list, tuple)) and len(value) == count
    if not is_list or not all(type(one) is int and one > 0 for one in value):
        raise InvalidArgument(
            f"{source}: expected {count} sizes for {name!r} of its configuration, found {shortened(value)}"
        )
    return tuple(value)


def inputs_of(
    module: nn.Module, batch_size: int, sequence_length: int | None = None, training: bool = False
) -> tuple[Callable[[], Inputs], int]:
    """A function that creates the arguments of a forward pass of a transformers model, and their number of tokens.

    Args:
        sequence_length: tokens of a sample; by default 512, or what the model can take if that is less.
        training: with the loss; else as to generate the next token.

    Raises:
        InvalidArgument: the model takes fewer tokens, or is not one of transformers.
    """
    config: Any = getattr(module, "config", None)
    name = type(module).__name__
    if not hasattr(config, "get_text_config") or not hasattr(module, "main_input_name"):
        raise InvalidArgument(
            f"{name} is not a model of transformers, so its inputs are unknown: pass make_inputs and sequence_length"
        )
    length = _length(name, config, sequence_length, "sequence_length")
    shape, _ = _main_input(module, config, batch_size, length)
    known = inspect.signature(module.forward).parameters
    options = {"use_cache": False} if training else {"use_cache": False, "logits_to_keep": 1}

    def make_inputs() -> Inputs:
        arguments = _arguments(module, config, shape, (batch_size, length))
        if not training:
            arguments.pop("labels", None)
        return (), arguments | {name: value for name, value in options.items() if name in known}

    return make_inputs, length


def _length(source: str, config: Any, wanted: int | None, option: str = "--sequence_length") -> int:
    limits = (
        getattr(config.get_text_config(), name, None) for name in ("max_position_embeddings", "max_target_positions")
    )
    longest = min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)
    if wanted is None:
        return min(_USUAL_LENGTH, longest or _USUAL_LENGTH)
    if longest is not None and wanted > longest:
        raise InvalidArgument(f"{option} {wanted}: {source} takes at most {longest} tokens")
    return wanted


def _main_input(module: nn.Module, config: Any, batch_size: int, length: int) -> tuple[tuple[int, ...], str]:
    """The shape of the first argument, and the batch in words."""
    kind, name = module.main_input_name, type(module).__name__
    if kind == "pixel_values":
        size, channels = getattr(config, "image_size", 224), getattr(config, "num_channels", 3)
        sizes = [channels, *(size if isinstance(size, (list, tuple)) else (size, size))]
        image = _sizes(sizes, 3, name, "num_channels and image_size")
        return (batch_size, *image), f"{batch_size} x {'x'.join(map(str, image))} pixels"
    if kind == "input_features":
        found = [getattr(config, one, None) for one in ("num_mel_bins", "max_source_positions")]
        bins, positions = _sizes(found, 2, name, "num_mel_bins and max_source_positions")
        shape = (batch_size, bins, 2 * positions)
        return shape, f"{batch_size} x {shape[2]} frames of sound"
    noun = "values of sound" if kind == "input_values" else "tokens"
    return (batch_size, length), f"{batch_size} x {length} {noun}"


def _arguments(module: nn.Module, config: Any, shape: tuple[int, ...], tokens: tuple[int, int]) -> dict[str, Any]:
    kind, known = str(module.main_input_name), inspect.signature(module.forward).parameters
    arguments: dict[str, Any] = {kind: torch.zeros(shape, dtype=torch.long if kind == "input_ids" else torch.float32)}
    if config.is_encoder_decoder:
        arguments["decoder_input_ids"] = torch.zeros(tokens, dtype=torch.long)
    name = type(module).__name__
    if "labels" in known and name.endswith(_LABELS_OF_TOKENS):
        arguments["labels"] = torch.zeros(tokens, dtype=torch.long)
    elif "labels" in known and name.endswith("Classification"):
        arguments["labels"] = torch.zeros(tokens[:1], dtype=torch.long)
    return arguments


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
