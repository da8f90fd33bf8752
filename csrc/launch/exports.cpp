// Functions that flashattn3/backends/hopper/library.py calls through ctypes, so that the library
// can be checked under every Python. Each returns a string that the library owns.
#include <exception>
#include <string>

#include "launch/registry.h"

extern "C" {

FLASHATTN3_EXPORT const char* flashattn3_configs_hash() { return flashattn3::configs_hash(); }

// Names of the compiled kernel configs, separated by spaces.
FLASHATTN3_EXPORT const char* flashattn3_compiled_configs() {
  static const std::string names = [] {
    std::string joined;
    for (const std::string& name : flashattn3::compiled_configs()) {
      joined += (joined.empty() ? "" : " ") + name;
    }
    return joined;
  }();
  return names.c_str();
}

FLASHATTN3_EXPORT const char* flashattn3_cuda_version() {
  static const std::string version = flashattn3::cuda_version();
  return version.c_str();
}

// Why this CUDA driver cannot run the library; empty if it can or if there is none.
FLASHATTN3_EXPORT const char* flashattn3_driver_error() {
  static const std::string error = [] {
    try {
      return flashattn3::driver_error();
    } catch (const std::exception& thrown) {
      return std::string(thrown.what());
    }
  }();
  return error.c_str();
}

}  // extern "C"
