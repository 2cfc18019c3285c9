// Walks over nested Python containers: lists, tuples, named tuples, mappings, dataclasses, and objects with a .to
// method.
#pragma once

#include <Python.h>

#include <c10/core/Device.h>

namespace accelerate_cpp {

struct MoveOptions {
  c10::Device device;
  bool non_blocking;
  PyObject* skip_keys;  // a borrowed tuple: entries of mappings with one of these keys stay where they are
};

// A tree of the same types with every tensor on the device. Anything that is not a container and has no .to is returned
// as it is, as is a tensor that is already on the device. Returns a new reference, or null with a Python error set.
PyObject* move_tree(PyObject* tree, const MoveOptions& options);

}  // namespace accelerate_cpp
