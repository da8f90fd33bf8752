// The module flashattn3._kernel_info: properties of the compiled kernels, for doctor and the tests.
// It is built for one version of Python, because pybind11 has no stable ABI. All else that
// flashattn3 reads from the operator library needs no module (launch/exports.cpp).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "launch/registry.h"

PYBIND11_MODULE(_kernel_info, module) {
  using flashattn3::KernelInfo;
  module.doc() = "Properties of the compiled Hopper kernels.";
  pybind11::class_<KernelInfo>(module, "KernelInfo",
                               "One compiled kernel. num_registers, local_bytes (spills and arrays "
                               "in local memory, per thread), max_threads and blocks_per_sm are -1 "
                               "without a GPU that can run it.")
      .def_readonly("name", &KernelInfo::name)
      .def_readonly("num_threads", &KernelInfo::num_threads)
      .def_readonly("shared_memory_bytes", &KernelInfo::shared_memory_bytes)
      .def_readonly("num_registers", &KernelInfo::num_registers)
      .def_readonly("local_bytes", &KernelInfo::local_bytes)
      .def_readonly("max_threads", &KernelInfo::max_threads)
      .def_readonly("blocks_per_sm", &KernelInfo::blocks_per_sm);
  module.def("kernel_info", &flashattn3::kernel_info,
             "All compiled kernels, as properties of the current GPU.");
}
