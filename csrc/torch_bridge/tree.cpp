#include "torch_bridge/tree.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>

namespace accelerate_cpp {
namespace {

struct Decref {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};
using Reference = std::unique_ptr<PyObject, Decref>;

Reference attribute(PyObject* object, const char* name) {
  Reference value(PyObject_GetAttrString(object, name));
  if (!value && PyErr_ExceptionMatches(PyExc_AttributeError)) {
    PyErr_Clear();
  }
  return value;
}

class Mover {
 public:
  explicit Mover(const MoveOptions& options) : options_(options) {}

  // Each returns a new reference, or null with a Python error set.
  Reference move(PyObject* object) {
    if (THPVariable_CheckExact(object)) {
      return move_tensor(object);
    }
    if (PyUnicode_Check(object) || PyBytes_Check(object) || PyLong_Check(object) || PyFloat_Check(object) ||
        object == Py_None) {
      return same(object);
    }
    if (Py_EnterRecursiveCall(" while moving a nested batch to a device") != 0) {
      return nullptr;
    }
    Reference result = move_object(object);
    Py_LeaveRecursiveCall();
    return result;
  }

 private:
  static Reference same(PyObject* object) { return Reference(Py_NewRef(object)); }

  Reference move_tensor(PyObject* object) {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    const c10::Device& target = options_.device;
    const bool any_index = !target.has_index() || target.is_cpu();
    if (tensor.device().type() == target.type() && (any_index || tensor.device() == target)) {
      return same(object);
    }
    return Reference(copy_tensor(tensor));
  }

  PyObject* copy_tensor(const at::Tensor& tensor) {
    HANDLE_TH_ERRORS
    return THPVariable_Wrap(tensor.to(options_.device, options_.non_blocking));
    END_HANDLE_TH_ERRORS
  }

  Reference move_object(PyObject* object) {
    // A class with a .to of its own (a tensor subclass, a BatchEncoding) knows best how to move itself.
    if (!PyList_CheckExact(object) && !PyTuple_CheckExact(object) && !PyDict_CheckExact(object) &&
        !PyType_Check(object)) {
      if (const Reference to = attribute(object, "to")) {
        return call_to(to.get());
      }
      if (PyErr_Occurred() != nullptr) {
        return nullptr;
      }
    }
    if (PyList_Check(object) || PyTuple_Check(object)) {
      return move_sequence(object);
    }
    if (PyDict_Check(object) || is_mapping(object)) {
      return move_mapping(object);
    }
    if (PyErr_Occurred() != nullptr) {
      return nullptr;
    }
    return move_dataclass(object);
  }

  Reference call_to(PyObject* to) {
    const Reference device(THPDevice_New(options_.device));
    if (options_.non_blocking) {
      const Reference arguments(PyTuple_Pack(1, device.get()));
      const Reference keywords(PyDict_New());
      if (!arguments || !keywords || PyDict_SetItemString(keywords.get(), "non_blocking", Py_True) != 0) {
        return nullptr;
      }
      Reference moved(PyObject_Call(to, arguments.get(), keywords.get()));
      if (moved || !PyErr_ExceptionMatches(PyExc_TypeError)) {
        return moved;
      }
      PyErr_Clear();  // its .to does not take non_blocking
    }
    return Reference(PyObject_CallOneArg(to, device.get()));
  }

  Reference move_sequence(PyObject* object) {
    const Reference items(PySequence_Tuple(object));
    if (!items) {
      return nullptr;
    }
    const Py_ssize_t size = PyTuple_GET_SIZE(items.get());
    Reference moved(PyList_New(size));
    for (Py_ssize_t i = 0; moved && i < size; ++i) {
      Reference item = move(PyTuple_GET_ITEM(items.get(), i));
      if (!item) {
        return nullptr;
      }
      PyList_SET_ITEM(moved.get(), i, item.release());
    }
    if (!moved || PyList_CheckExact(object)) {
      return moved;
    }
    if (PyTuple_CheckExact(object)) {
      return Reference(PyList_AsTuple(moved.get()));
    }
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    if (const Reference make = attribute(type, "_make")) {  // named tuples take their fields one by one
      return Reference(PyObject_CallOneArg(make.get(), moved.get()));
    }
    return PyErr_Occurred() != nullptr ? nullptr : Reference(PyObject_CallOneArg(type, moved.get()));
  }

  static bool is_mapping(PyObject* object) {
    static PyObject* const mapping = [] {
      const Reference module(PyImport_ImportModule("collections.abc"));
      return module ? PyObject_GetAttrString(module.get(), "Mapping") : nullptr;
    }();
    return mapping != nullptr && PyObject_IsInstance(object, mapping) == 1;
  }

  Reference move_mapping(PyObject* object) {
    const Reference items(PyMapping_Items(object));
    const Reference moved(items ? PyDict_New() : nullptr);
    if (!moved) {
      return nullptr;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items.get()); ++i) {
      PyObject* const pair = PyList_GET_ITEM(items.get(), i);
      PyObject* const key = PyTuple_GET_ITEM(pair, 0);
      PyObject* const value = PyTuple_GET_ITEM(pair, 1);
      const int skipped = PySequence_Contains(options_.skip_keys, key);
      const Reference result = skipped < 0 ? nullptr : skipped == 1 ? same(value) : move(value);
      if (!result || PyDict_SetItem(moved.get(), key, result.get()) != 0) {
        return nullptr;
      }
    }
    if (PyDict_CheckExact(object)) {
      return Reference(Py_NewRef(moved.get()));
    }
    return rebuild_mapping(object, moved.get());
  }

  // A mapping of a class of its own; default dictionaries keep their factory.
  static Reference rebuild_mapping(PyObject* object, PyObject* entries) {
    const Reference factory = attribute(object, "default_factory");
    if (PyErr_Occurred() != nullptr) {
      return nullptr;
    }
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    return Reference(factory ? PyObject_CallFunctionObjArgs(type, factory.get(), entries, nullptr)
                             : PyObject_CallOneArg(type, entries));
  }

  // A copy of the instance whose fields are moved; frozen dataclasses and fields outside __init__ included. Fields that
  // have not been set are left out.
  Reference move_dataclass(PyObject* object) {
    if (PyType_Check(object) || !attribute(object, "__dataclass_fields__")) {
      return PyErr_Occurred() != nullptr ? nullptr : same(object);
    }
    const Reference dataclasses(PyImport_ImportModule("dataclasses"));
    const Reference fields(dataclasses ? PyObject_CallMethod(dataclasses.get(), "fields", "O", object) : nullptr);
    const Reference copy_module(fields ? PyImport_ImportModule("copy") : nullptr);
    Reference copied(copy_module ? PyObject_CallMethod(copy_module.get(), "copy", "O", object) : nullptr);
    for (Py_ssize_t i = 0; copied && i < PyTuple_GET_SIZE(fields.get()); ++i) {
      const Reference name(PyObject_GetAttrString(PyTuple_GET_ITEM(fields.get(), i), "name"));
      if (!name || !move_field(object, copied.get(), name.get())) {
        return nullptr;
      }
    }
    return copied;
  }

  bool move_field(PyObject* from, PyObject* to, PyObject* name) {
    const Reference value = attribute(from, PyUnicode_AsUTF8(name));
    if (!value) {
      return PyErr_Occurred() == nullptr;
    }
    const Reference moved = move(value.get());
    return moved && PyObject_GenericSetAttr(to, name, moved.get()) == 0;
  }

  const MoveOptions& options_;
};

}  // namespace

PyObject* move_tree(PyObject* tree, const MoveOptions& options) {
  return Mover(options).move(tree).release();
}

}  // namespace accelerate_cpp
