"""Walks over nested data, and collectives with one process."""

from __future__ import annotations

import inspect
import pickle
from collections import OrderedDict, defaultdict, namedtuple

import accelerate.utils.operations as original
import pytest
import torch

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.state import PartialState
from accelerate_cpp.utils import operations
from accelerate_cpp.utils.operations import CannotPadNestedTensorWarning, GatheredParameters, pad_input_tensors

Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "name",
    [
        "GatheredParameters",
        "broadcast",
        "broadcast_object_list",
        "concatenate",
        "convert_outputs_to_fp32",
        "convert_to_fp32",
        "copy_tensor_to_devices",
        "find_batch_size",
        "find_device",
        "gather",
        "gather_object",
        "get_data_structure",
        "honor_type",
        "ignorant_find_batch_size",
        "initialize_tensors",
        "is_namedtuple",
        "is_tensor_information",
        "is_torch_tensor",
        "listify",
        "pad_across_processes",
        "pad_input_tensors",
        "reduce",
        "send_to_device",
        "slice_tensors",
    ],
)
def test_parameters_are_those_of_the_original(name):
    def shape(function):
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert shape(getattr(operations, name)) == shape(getattr(original, name))


def test_a_function_is_applied_to_every_tensor_and_types_are_kept():
    data = {"list": [torch.zeros(1), "text"], "pair": Pair(torch.ones(1), (torch.ones(1),)), "none": None}
    result = operations.recursively_apply(lambda tensor, plus: tensor + plus, data, plus=2)
    assert result["list"][0].item() == 2
    assert result["list"][1] == "text"
    assert type(result["pair"]) is Pair
    assert result["pair"].b[0].item() == 3
    assert result["none"] is None
    assert type(operations.recursively_apply(abs, OrderedDict(x=torch.zeros(1)))) is OrderedDict


def test_descriptions_of_tensors_are_told_from_tensors():
    described = operations.get_data_structure({"x": torch.zeros(2, 3)})["x"]
    assert described == operations.TensorInformation(torch.Size((2, 3)), torch.float32)
    assert operations.is_tensor_information(described)
    assert not operations.is_tensor_information(torch.zeros(2, 3))


def test_another_leaf_is_an_error_if_asked_for():
    with pytest.raises(TypeError, match=r"^Unsupported types \(<class 'str'>\) passed to"):
        operations.recursively_apply(lambda tensor: tensor, [torch.zeros(1), "text"], error_on_other_type=True)


def test_the_batch_size_is_the_first_tensors():
    assert operations.find_batch_size({"a": [torch.zeros(3, 1), torch.zeros(2)]}) == 3
    with pytest.raises(ValueError, match="empty list"):
        operations.find_batch_size({"a": []})
    with pytest.raises(InvalidArgument, match="has no dimension"):
        operations.find_batch_size([torch.tensor(1.0)])
    with pytest.raises(TypeError, match="found a str"):
        operations.find_batch_size(["a"])


def test_the_device_is_the_first_tensors():
    assert operations.find_device({"a": ["x", torch.zeros(1, device="meta")]}) == torch.device("meta")
    assert operations.find_device(["x", {}]) is None


def test_slices_and_concatenations_are_inverse():
    data = {"x": torch.arange(4), "y": (torch.arange(8).view(4, 2),)}
    parts = [operations.slice_tensors(data, slice(0, 1)), operations.slice_tensors(data, slice(1, 4))]
    joined = operations.concatenate(parts)
    assert torch.equal(joined["x"], data["x"])
    assert torch.equal(joined["y"][0], data["y"][0])


def test_only_tensors_can_be_concatenated():
    assert operations.concatenate([{"x": "text"}]) == {"x": "text"}
    with pytest.raises(TypeError, match="found a str"):
        operations.concatenate([["a"], ["b"]])


def test_a_structure_is_enough_to_receive_data():
    data = [torch.zeros(2, 3, dtype=torch.float64), torch.tensor(1), "text"]
    received = operations.initialize_tensors(operations.get_data_structure(data))
    assert [(leaf.shape, leaf.dtype) for leaf in received[:2]] == [((2, 3), torch.float64), ((), torch.int64)]
    assert received[2] == "text"


def test_halves_become_floats_and_others_stay():
    result = operations.convert_to_fp32([torch.zeros(1).half(), torch.zeros(1).bfloat16(), torch.zeros(1).long()])
    assert [tensor.dtype for tensor in result] == [torch.float32, torch.float32, torch.int64]


def test_one_process_gets_back_what_it_gave():
    tensor, items = torch.ones(2), [1]
    assert operations.gather(tensor) is tensor
    assert operations.pad_across_processes(tensor) is tensor
    assert operations.broadcast(tensor) is tensor
    assert operations.gather_object(items) is items
    assert operations.broadcast_object_list(items) is items


def test_nested_tensors_are_not_padded_and_warned_of():
    nested = torch.nested.nested_tensor([[1, 2, 3], [1], [1, 2]])
    with pytest.warns(CannotPadNestedTensorWarning):
        assert operations.pad_across_processes(nested) is nested
    tensor = torch.ones(2, 3)
    assert operations.pad_across_processes(tensor, dim=-3) is tensor


def test_one_process_reduces_to_a_copy():
    tensor = torch.ones(2)
    reduced = operations.reduce(tensor, "mean", scale=2.0)
    assert reduced is not tensor
    assert torch.equal(reduced, tensor)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(InvalidArgument, match="'median'"):
        operations.reduce(torch.ones(1), "median")


def test_data_is_sent_to_a_device():
    sent = operations.send_to_device({"x": [torch.zeros(2)], "y": 1}, "meta")
    assert sent["x"][0].device.type == "meta"
    assert sent["y"] == 1


def test_a_batch_size_that_cannot_be_found_can_be_ignored():
    assert operations.ignorant_find_batch_size({"a": [torch.zeros(3, 1)]}) == 3
    assert operations.ignorant_find_batch_size(["a"]) is None
    assert operations.ignorant_find_batch_size([]) is None


def test_tensors_become_lists_of_numbers():
    data = {"a": [torch.tensor([[1.5, 2.0]], dtype=torch.bfloat16), "x"], "b": torch.tensor(3, requires_grad=False)}
    assert operations.listify(data) == {"a": [[[1.5, 2.0]], "x"], "b": 3}


def test_a_forward_can_give_floats():
    def forward(tensor, *, scale):
        """Scales."""
        return {"scaled": tensor * scale}

    converted = operations.convert_outputs_to_fp32(forward)
    assert converted(torch.ones(1).half(), scale=2)["scaled"].dtype == torch.float32
    assert converted.__doc__ == "Scales."


def test_a_forward_that_gives_floats_is_not_pickled():
    converted = operations.ConvertOutputsToFp32(len)
    assert converted([1, 2]) == 2
    assert converted.__name__ == "len"
    with pytest.raises(pickle.PicklingError, match="unwrap_model"):
        pickle.dumps(converted)


@pytest.mark.parametrize("debug", [False, True])
def test_shapes_are_compared_where_the_state_says_so(fresh_state, monkeypatch, debug):
    state, told = PartialState(cpu=True), []
    state.debug = debug
    monkeypatch.setattr(operations, "world_size", lambda: 2)
    monkeypatch.setattr(operations, "gather_object", lambda shapes: told.append(shapes) or shapes)
    assert operations._check_shapes(lambda tensor: "done")(torch.ones(2)) == "done"
    assert told == ([[[2]]] if debug else [])


def test_one_process_copies_its_own_tensor():
    tensor = torch.arange(3)
    copied = operations.copy_tensor_to_devices(tensor)
    assert torch.equal(copied, tensor)
    assert copied.data_ptr() != tensor.data_ptr()
    with pytest.raises(InvalidArgument, match="found one on ranks \\[\\]"):
        operations.copy_tensor_to_devices()


def test_mappings_of_other_classes_keep_their_type():
    batch = defaultdict(list, x=torch.arange(4))
    parts = [operations.slice_tensors(batch, slice(0, 1)), operations.slice_tensors(batch, slice(1, 4))]
    joined = operations.concatenate(parts)
    assert (type(joined), joined.default_factory) == (defaultdict, list)
    assert torch.equal(joined["x"], batch["x"])


@pytest.mark.parametrize("batch_size", range(1, 9))
@pytest.mark.parametrize("processes", range(1, 6))
def test_inputs_are_padded_with_zeros_to_the_next_multiple(batch_size, processes):
    rows = torch.arange(1, batch_size + 1)
    padded = pad_input_tensors({"x": rows, "y": [rows.unsqueeze(1)]}, batch_size, processes)
    length = len(padded["x"])
    assert length % processes == 0
    assert batch_size <= length < batch_size + processes
    assert padded["x"].tolist() == rows.tolist() + [0] * (length - batch_size)
    assert padded["y"][0].shape == (length, 1)


@pytest.mark.parametrize(("batch_size", "processes"), [(1, 4), (3, 4), (5, 2), (4, 2), (7, 3)])
def test_inputs_are_padded_as_in_the_original_where_that_gives_equal_parts(batch_size, processes):
    rows = torch.rand(batch_size, 2)
    theirs = original.pad_input_tensors(rows, batch_size, processes)
    ours = pad_input_tensors(rows, batch_size, processes)
    if len(theirs) % processes == 0 and len(theirs) < batch_size + processes:
        assert torch.equal(ours, theirs)
    else:
        assert (batch_size, processes, len(ours)) == (7, 3, 9)


def test_another_dimension_can_be_padded():
    assert pad_input_tensors(torch.ones(2, 3), 3, 2, dim=1).tolist() == [[1, 1, 1, 0]] * 2
    assert pad_input_tensors(torch.ones(2, 3), 3, 2, dim=-1).shape == (2, 4)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [(torch.ones(5), r"batch_size=4 rows in dimension 0; found one of shape \(5,\)"), (torch.ones(()), r"shape \(\)")],
)
def test_inputs_that_are_no_batch_are_refused(tensor, message):
    with pytest.raises(InvalidArgument, match=message):
        pad_input_tensors(tensor, 4, 2)


def test_no_parts_are_refused():
    with pytest.raises(InvalidArgument, match="num_processes=0"):
        pad_input_tensors(torch.ones(1), 1, 0)
    with pytest.raises(TypeError):
        pad_input_tensors(["text"], 1, 1)


def test_whole_parameters_stay_as_they_are_and_can_be_changed():
    model = torch.nn.Linear(2, 2)
    with GatheredParameters(model.parameters(), modifier_rank=0) as nothing:
        model.weight.data.fill_(3.0)
        assert nothing is None
    assert model.weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    with pytest.raises(KeyError), GatheredParameters([]):
        raise KeyError
