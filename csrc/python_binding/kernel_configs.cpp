// The module flashattn3._kernel_configs: kernel configs of the operator library and properties of
// their compiled kernels, for doctor and the tests. Uses Python's stable ABI, so that one build
// serves every Python from 3.10.
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <exception>
#include <string>

#include "launch/registry.h"

namespace {

PyObject* as_python(const std::string& name) { return PyUnicode_FromString(name.c_str()); }

PyObject* as_python(const flashattn3::KernelInfo& info) {
  return Py_BuildValue("{s:s,s:i,s:i,s:i,s:i,s:i,s:i}", "name", info.name.c_str(), "num_threads",
                       info.num_threads, "shared_memory_bytes", info.shared_memory_bytes,
                       "num_registers", info.num_registers, "local_bytes", info.local_bytes,
                       "max_threads", info.max_threads, "blocks_per_sm", info.blocks_per_sm);
}

// Converts a registry function's result to a Python list, and its exceptions to RuntimeError.
template <typename Function>
PyObject* list_of(Function function) {
  PyObject* list = PyList_New(0);
  if (list == nullptr) return nullptr;
  try {
    for (const auto& value : function()) {
      PyObject* item = as_python(value);
      const bool appended = item != nullptr && PyList_Append(list, item) == 0;
      Py_XDECREF(item);
      if (!appended) {
        Py_DECREF(list);
        return nullptr;
      }
    }
  } catch (const std::exception& error) {
    Py_DECREF(list);
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  return list;
}

PyObject* compiled_configs(PyObject*, PyObject*) { return list_of(flashattn3::compiled_configs); }

PyObject* kernel_info(PyObject*, PyObject*) { return list_of(flashattn3::kernel_info); }

PyObject* configs_hash(PyObject*, PyObject*) {
  return PyUnicode_FromString(flashattn3::configs_hash());
}

PyObject* driver_error(PyObject*, PyObject*) {
  try {
    return as_python(flashattn3::driver_error());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyMethodDef methods[] = {
    {"compiled_configs", compiled_configs, METH_NOARGS, "Names of the compiled kernel configs."},
    {"driver_error", driver_error, METH_NOARGS,
     "Why this CUDA driver cannot run the kernels; empty where it can, or is not there."},
    {"kernel_info", kernel_info, METH_NOARGS,
     "One dict for each compiled kernel. What only a GPU that runs it knows (num_registers,\n"
     "local_bytes of spills, max_threads, blocks_per_sm) is -1 elsewhere."},
    {"configs_hash", configs_hash, METH_NOARGS,
     "flashattn3.dispatch.kernel_configs.configs_hash() at the time of the build."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernel_configs", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit__kernel_configs() { return PyModule_Create(&module); }
