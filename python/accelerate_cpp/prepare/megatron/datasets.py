"""Data in Megatron-LM's own form, which a program's own function provides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import DataLoader

from accelerate_cpp.errors import InvalidArgument

__all__ = ["MegatronLMDummyDataLoader"]

Datasets = tuple[Any, Any, Any]


class MegatronLMDummyDataLoader:
    """Stands for the loaders of training, validation and test data; ``prepare`` gives one for each time it is passed.

    Args:
        dataset_kwargs: options of the data by Megatron-LM's names; ``micro_batch_size`` is needed.

    Attributes:
        dataset_args: these options.
    """

    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args: dict[str, Any] = {**dataset_kwargs, "megatron_dataset_flag": True}

    def set_megatron_data_args(self) -> None:
        """Writes the options into the arguments of the run's plugin.

        Raises:
            InvalidArgument: the run has no ``MegatronLMPlugin``.
        """
        from accelerate_cpp.runtime import current

        plugin = None if current.session is None else current.session.config.megatron_plugin
        if plugin is None:
            raise InvalidArgument(
                "MegatronLMDummyDataLoader: this run has no MegatronLMPlugin; pass megatron_lm_plugin to Accelerator"
            )
        plugin.megatron_dataset_flag = True
        plugin.megatron_lm_default_args.update(self.dataset_args)

    def get_train_valid_test_datasets_provider(self, accelerator: Any) -> Callable[[list[int]], Datasets]:
        """The function that makes the datasets, from the numbers of samples in training, validation and test.

        Raises:
            InvalidArgument: the plugin of ``accelerator`` has no ``custom_megatron_datasets_provider_function``.
        """
        provider = accelerator.state.megatron_lm_plugin.custom_megatron_datasets_provider_function
        if provider is None:
            raise InvalidArgument(
                "MegatronLMDummyDataLoader: only Megatron-LM reads its indexed files; pass "
                "custom_megatron_datasets_provider_function to MegatronLMPlugin, which returns three datasets, or a "
                "DataLoader to prepare"
            )
        return provider  # type: ignore[no-any-return]

    def build_train_valid_test_data_iterators(self, accelerator: Any) -> Sequence[DataLoader[Any] | None]:
        """Loaders of micro-batches of the three datasets, which are not prepared; ``None`` for one that is missing."""
        plugin = accelerator.state.megatron_lm_plugin
        size = self.dataset_args.get("micro_batch_size")
        if not isinstance(size, int) or size < 1:
            raise InvalidArgument(
                f"MegatronLMDummyDataLoader: micro_batch_size={size!r}; pass the rows of a micro-batch, 1 or more"
            )
        rows = size * int(plugin.num_micro_batches or 1) * accelerator._session.topology.mesh.data_size
        steps = int(plugin.train_iters or 0)
        evaluations = (steps // int(plugin.eval_interval) + 1) * int(plugin.eval_iters)
        numbers = [plugin.train_samples or steps * rows, evaluations * rows, int(plugin.eval_iters) * rows]
        datasets = self.get_train_valid_test_datasets_provider(accelerator)(numbers)
        return [None if one is None else DataLoader(one, batch_size=size) for one in datasets]
