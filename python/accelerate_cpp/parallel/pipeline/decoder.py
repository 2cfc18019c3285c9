"""How a decoder of Transformers (``...ForCausalLM``) is cut: between its layers, which its own code calls.

A stage is the model with only its layers in the list of layers. Later stages get hidden states in place of embeddings;
what comes before the layers (embeddings, their norms and dropout) then does nothing, nor does the last norm on stages
before the last one. Rotary embeddings have no parameters and are on every stage, and so are masks, which every stage
makes from the same arguments.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.pipeline.blocks import Absent, Batch, Batches, Block, cost_of, sendable, shallow_copy

__all__ = ["DecoderBatches", "DecoderStage", "DivisibleDecoder", "names_of_layers"]

_IGNORED = -100
"""The label of tokens that do not count, as in Transformers."""
_NAMED = ("attention_mask", "position_ids")
"""What stages take beside tokens or hidden states."""


class _Nothing(Absent):
    """In place of learned positions, which the first stage has added already."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())


class DecoderStage(nn.Module):
    """Neighbouring layers of a decoder under their names in the model.

    Takes tokens, integers of shape (rows, tokens), on the first stage, and hidden states of shape (rows, tokens, width)
    on others; and ``attention_mask`` and ``position_ids`` by name. Returns hidden states, or logits on the last stage.

    Args:
        model: a copy of the whole model that has only the modules of this stage.
        core: the name of the module that has the list of layers.
    """

    def __init__(self, model: nn.Module, core: str, first: bool, last: bool) -> None:
        super().__init__()
        # What replaces a parameter or module of this one replaces it in the model whose code runs, and vice versa.
        for name in ("_modules", "_parameters", "_buffers"):
            self.__dict__[name] = model.__dict__[name]
        self.__dict__["model_of_stage"] = model
        self.training = model.training
        self._core, self._first, self._last = core, first, last

    def forward(self, inputs: Tensor, **kwargs: Any) -> Tensor:
        model: nn.Module = self.__dict__["model_of_stage"]
        model.training = self.training
        given = {"input_ids" if self._first else "inputs_embeds": inputs, "use_cache": False, **kwargs}
        output = (model if self._last else self.get_submodule(self._core))(**given)
        value: Tensor = sendable(output[0])
        return value


class DivisibleDecoder:
    """A decoder as blocks: its embeddings, its layers, and its last norm with the head.

    Args:
        model: not changed; stages share its modules.

    Raises:
        InvalidArgument: the model does something between its layers and the rest that stages could not.
    """

    @staticmethod
    def accepts(model: nn.Module) -> bool:
        """Whether the model has embeddings, a list of as many layers as its configuration says, and a head."""
        return _layers_of(model) is not None and _embeddings(model, "output") is not None

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        self.batches: Batches = DecoderBatches(model)
        name = type(model).__name__
        self._list = _layers_of(model) or ""
        self._core = self._list.rpartition(".")[0]
        core = model.get_submodule(self._core)
        layers = model.get_submodule(self._list)
        if getattr(model.config, "output_router_logits", False):
            raise InvalidArgument(
                f"pipeline: {name} adds the losses of its routers to its loss, which stages do not pass on; set "
                "config.output_router_logits=False"
            )
        if any("forward" in module.__dict__ for module in (model, core)):
            raise InvalidArgument(
                f"pipeline: the forward method of {name} was replaced, as preparing it or hooks do, and runs all "
                "layers; cut the model before that"
            )
        self._keys = list(layers._modules)
        self._stubs: dict[str, nn.Module | None] = {}  # in place of what precedes the layers
        self._norms: list[str] = []
        self._rotary: list[str] = []
        for label, child in core._modules.items():
            if child is not None and child is not layers:
                self._classify(label, child)
        before = [core._modules[label] for label in self._stubs]
        head = _embeddings(model, "output")
        after = [core.get_submodule(label) for label in self._norms]
        prefix = f"{self._core}." if self._core else ""
        head_names = [path for path, module in model.named_modules() if module is head]
        self.blocks = [
            Block(tuple(f"{prefix}{label}" for label in self._stubs), cost_of(filter(None, before))),
            *(Block((f"{self._list}.{key}",), cost_of([layers.get_submodule(key)])) for key in self._keys),
            Block(
                (*(f"{prefix}{label}" for label in self._norms), *head_names), cost_of([*after, *filter(None, [head])])
            ),
        ]
        self._check()

    def _classify(self, label: str, child: nn.Module) -> None:
        kind = type(child).__name__.lower()
        if child is _embeddings(self._model, "input"):
            self._stubs[label] = None
        elif isinstance(child, nn.Embedding):
            self._stubs[label] = _Nothing()
        elif isinstance(child, nn.Dropout) or ("norm" in kind and "embed" in label.lower()):
            self._stubs[label] = Absent()
        elif "norm" in kind:
            self._norms.append(label)
        elif "rotary" in kind and not any(True for _ in child.parameters()):
            self._rotary.append(label)
        else:
            raise InvalidArgument(
                f"pipeline: {type(self._model).__name__} has {self._core}.{label} ({type(child).__name__}) beside its "
                "layers, of which it is not known which stages need it; expected embeddings, dropout, norms and rotary "
                "embeddings. Write the stages with torch.distributed.pipelining"
            )

    def _check(self) -> None:
        """Raises InvalidArgument if the model without layers, embeddings and norms changes hidden states."""
        embeddings = _embeddings(self._model, "input")
        width = getattr(embeddings, "embedding_dim", None) or self._model.config.hidden_size
        model = self._cut(1, 1)
        core = model.get_submodule(self._core)
        for label in self._rotary:
            core._modules[label] = _Nothing()
        core.training = False
        hidden = torch.linspace(-1, 1, 2 * width).reshape(1, 2, width)
        reason = "its code changes hidden states outside of its layers, as by a factor for embeddings"
        try:
            with torch.no_grad():
                same = torch.equal(core(inputs_embeds=hidden, use_cache=False)[0], hidden)
        except Exception as error:
            same, reason = (
                False,
                f"it does not run on hidden states ({type(error).__name__}: {shorten(str(error), 200)})",
            )
        if not same:
            raise InvalidArgument(
                f"pipeline: {type(self._model).__name__} cannot be cut between its layers, because {reason}; write the "
                "stages with torch.distributed.pipelining"
            )

    def stage(self, begin: int, end: int) -> nn.Module:
        return DecoderStage(self._cut(begin, end), self._core, begin == 0, end == len(self.blocks))

    def _cut(self, begin: int, end: int) -> Any:
        """A copy of the model with the blocks from ``begin`` to before ``end``."""
        keys = self._keys[max(0, begin - 1) : max(0, end - 1)]
        model = core = shallow_copy(self._model)
        for label in filter(None, self._core.split(".")):
            core._modules[label] = shallow_copy(core._modules[label])
            core = core._modules[label]
        list_label = self._list.rpartition(".")[2]
        layers = core._modules[list_label] = shallow_copy(core._modules[list_label])
        layers._modules = {key: layers._modules[key] for key in keys}
        core.config = _of_layers(core.config, [self._keys.index(key) for key in keys])
        if begin > 0:
            core._modules.update(self._stubs)
        if end < len(self.blocks):
            core._modules.update({label: Absent() for label in self._norms})
            head = _embeddings(self._model, "output")
            for label in [label for label, module in model._modules.items() if module is head]:
                model._modules[label] = None
        return model


class DecoderBatches:
    """Batches of a decoder: tokens, and what is given beside them by name.

    Args:
        model: its class names it in errors; its loss is that of the batches.
    """

    shapes_follow_inputs = True

    def __init__(self, model: Any) -> None:
        self._name = type(model).__name__
        self._loss_function, self._vocabulary = model.loss_function, model.config.vocab_size

    def read(self, inputs: Any, targets: Any, kwargs: Mapping[str, Any] | None) -> Batch:
        if isinstance(inputs, Mapping):
            named = {**inputs, **(kwargs or {})}
            tokens, labels = named.pop("input_ids", None), named.pop("labels", None)
            if targets is None:
                targets = dict(inputs) if labels is None else labels
        else:
            named = dict(kwargs or {})
            tokens = inputs[0] if isinstance(inputs, (tuple, list)) and len(inputs) == 1 else inputs
        named = {name: value for name, value in named.items() if value is not None}
        unknown = [name for name in named if name not in _NAMED]
        if unknown:
            raise InvalidArgument(
                f"pipeline: a stage of {self._name} does not take {', '.join(unknown)}; expected "
                f"input_ids, labels, {', '.join(_NAMED)}"
            )
        if not isinstance(tokens, Tensor):
            raise InvalidArgument(
                f"pipeline: {self._name} takes input_ids, a tensor of shape (rows, tokens), alone or in a mapping, but "
                f"got {type(inputs).__name__}"
            )
        return Batch((tokens,), named, targets)

    def read_call(self, inputs: Mapping[str, Any]) -> Batch:
        named = {name: value for name, value in inputs.items() if value is not None and name != "return_dict"}
        if not named.get("use_cache", True):
            del named["use_cache"]
        if "labels" in named:
            raise InvalidArgument(f"pipeline: stages of {self._name} return logits and no loss; leave labels out")
        return self.read({"input_ids": None, **named}, None, None)

    def default_loss(self, outputs: Any, targets: Any, count: float) -> Tensor:
        loss: Tensor = self._loss_function(outputs, targets, vocab_size=self._vocabulary, num_items_in_batch=count)
        return loss

    def counted(self, targets: Any) -> int | None:
        """Labels but for the first one of each row, which nothing predicts."""
        labels = targets.get("labels") if isinstance(targets, Mapping) else targets
        if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.is_floating_point():
            return None
        return int((labels[:, 1:] != _IGNORED).sum())


def _embeddings(model: nn.Module, which: str) -> nn.Module | None:
    getter = getattr(model, f"get_{which}_embeddings", None)
    try:
        found = getter() if callable(getter) else None
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, nn.Module) else None


def names_of_layers(model: nn.Module) -> list[str]:
    """The names of the layers of a decoder of Transformers, in order; none of another model."""
    found = _layers_of(model)
    return [] if found is None else [f"{found}.{name}" for name, _ in model.get_submodule(found).named_children()]


def _layers_of(model: nn.Module) -> str | None:
    """The name of the list of layers nearest to the top of a decoder."""
    config = getattr(model, "config", None)
    count = getattr(config, "num_hidden_layers", None)
    if count is None or getattr(config, "is_encoder_decoder", False) or _embeddings(model, "input") is None:
        return None
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and "." in name
    ]
    return min(found, key=lambda name: name.count("."), default=None)


def _of_layers(config: Any, numbers: list[int]) -> Any:
    """The configuration of a model that has only these layers."""
    copied = copy.copy(config)
    count = config.num_hidden_layers
    for name, value in vars(config).items():
        if "layer" in name and isinstance(value, list) and len(value) == count:
            copied.__dict__[name] = [value[number] for number in numbers]
    copied.__dict__[getattr(config, "attribute_map", {}).get("num_hidden_layers", "num_hidden_layers")] = len(numbers)
    return copied
