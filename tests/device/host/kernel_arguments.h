// Reads the arguments of the kernels of cached calls as numbers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

// The words of the arguments of an append or decode kernel, with 0 in place of padding; none of
// another kernel. name: mangled.
std::vector<uint64_t> words_of_arguments(const std::string& name, void** arguments);
