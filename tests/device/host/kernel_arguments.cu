// Reads the kernels' structs, whose headers have device code.
#include <cstring>

#include "append/arguments.h"
#include "backward/arguments.h"
#include "decode/arguments.h"
#include "decode/fill_arguments.h"
#include "decode/join_arguments.h"
#include "forward/option_arguments.h"
#include "kernel_arguments.h"
#include "quantize/arguments.h"

namespace {

template <class Arguments>
std::vector<uint64_t> words_of(const void* arguments) {
  Arguments copy = *static_cast<const Arguments*>(arguments);
  __builtin_clear_padding(&copy);
  static_assert(sizeof(copy) % sizeof(uint64_t) == 0);
  std::vector<uint64_t> words(sizeof(copy) / sizeof(uint64_t));
  std::memcpy(words.data(), &copy, sizeof(copy));
  return words;
}

}  // namespace

std::vector<uint64_t> words_of_arguments(const std::string& name, void** arguments) {
  const auto is = [&](const char* part) { return name.find(part) != std::string::npos; };
  if (is("append_kernel")) return words_of<flashattn3::append::Arguments>(arguments[0]);
  // The last fields of decode::Config are num_byte_tiles, tree and prefix.
  if (is("decode_kernel") && is("Li0ELb1ELb0EE")) {
    return words_of<flashattn3::decode::TreeArguments>(arguments[0]);
  }
  if (is("decode_kernel") && is("ELb0ELb1EE")) {
    return words_of<flashattn3::decode::PrefixArguments>(arguments[0]);
  }
  if (is("join_prefix")) return words_of<flashattn3::decode::JoinArguments>(arguments[0]);
  if (is("decode_kernel") || is("warp_kernel")) {
    return words_of<flashattn3::decode::Arguments>(arguments[0]);
  }
  if (is("embed_blocks")) return words_of<flashattn3::quantize::EmbeddedArguments>(arguments[0]);
  if (is("quantize_blocks")) return words_of<flashattn3::quantize::Arguments>(arguments[0]);
  if (is("fill_rows")) return words_of<flashattn3::decode::FillArguments>(arguments[0]);
  if (is("QuantizedRoles")) return words_of<flashattn3::forward::Arguments>(arguments[0]);
  if (is("ListedRoles")) return words_of<flashattn3::forward::ListedArguments>(arguments[0]);
  const bool is_main = is("backward") && is("16attention_kernel");
  if (is_main && is("ScoreTermE0ELb1E")) {  // the last field of backward::Config is listed
    return words_of<flashattn3::backward::ListedArguments>(arguments[0]);
  }
  return {};
}
