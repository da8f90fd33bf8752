// Keeps the launches of calls, each under the number of its options and what else of a call a plan
// depends on, and finds them for further calls like it, as each layer of a model is like the layer
// before: it reads the tensors in less time than Python takes to make a key of them.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "call_tensors.h"
#include "torch_binding/attention_call.h"
#include "torch_binding/boxed.h"
#include "torch_binding/launch_record.h"
#include "torch_binding/mask_tensors.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {

// A sum of products, which the processor computes side by side. Key: an array of numbers.
template <class Key>
struct HashOf {
  size_t operator()(const Key& key) const {
    uint64_t hash = 0, factor = 1;
    for (const int64_t word : key) {
      factor *= 0x9e3779b97f4a7c15;  // 2^64 / golden ratio, odd
      hash += static_cast<uint64_t>(word) * factor;
    }
    return hash ^ hash >> 32;
  }
};

// The launches of calls, dense or cached; any thread may find and keep them. A key begins with the
// number of a call's options. A model with dynamic shapes meets new keys in every step: a full
// cache is emptied, and the calls that still come are kept again, from plans that Python has.
template <class Key, class Launch>
class LaunchCache {
 public:
  std::optional<Launch> find(const Key& key) {
    const std::lock_guard lock(mutex_);
    const auto found = launches_.find(key);
    if (found == launches_.end()) return std::nullopt;
    return found->second;
  }

  void keep(const Key& key, Launch launch) {
    Launches dropped;  // with its tensors after the lock: Python may run then
    const std::lock_guard lock(mutex_);
    if (launches_.size() >= kMost) dropped.swap(launches_);
    const auto [found, is_new] = launches_.try_emplace(key, launch);
    if (!is_new) std::swap(found->second, launch);
  }

  // Drops those of calls with these options.
  void forget(int64_t options) {
    Launches dropped;
    const std::lock_guard lock(mutex_);
    for (auto next = launches_.begin(); next != launches_.end();) {
      const auto found = next++;
      if (found->first[0] == options) dropped.insert(launches_.extract(found));
    }
  }

 private:
  static constexpr size_t kMost = 4096;  // 2 MB of both passes
  using Launches = std::unordered_map<Key, Launch, HashOf<Key>>;
  std::mutex mutex_;
  Launches launches_;
};

// The tensors of a call as its caller has them, FLASHATTN3_FOUND_SCHEMA of the operators, and
// FLASHATTN3_SCORES of their overload "scores". q, k and v have four axes, also with cu_seqlens.
struct GivenTensors {
#define FLASHATTN3_REQUIRED(name) Tensor name;
#define FLASHATTN3_OPTIONAL(name) std::optional<Tensor> name;
  FLASHATTN3_FOUND_TENSORS(FLASHATTN3_REQUIRED, FLASHATTN3_OPTIONAL)
  FLASHATTN3_SCORE_TENSORS(FLASHATTN3_OPTIONAL)
#undef FLASHATTN3_REQUIRED
#undef FLASHATTN3_OPTIONAL

  static GivenTensors take(Arguments& arguments);
  bool varlen() const { return cu_seqlens_q.has_value(); }
  // The call with other q, k and v.
  CallTensors with_sides(const Tensor& q, const Tensor& k, const Tensor& v, bool bhsd) const;
};

// The mask of calls whose options have a number for this mask alone, so that the operators take no
// tensors of it. Deterministic calls are not kept: their turns follow the values of the lists.
struct KeptMask {
  MaskTensors of_queries, of_keys;
};

// Both passes of a call.
struct KeptPasses {
  AttentionLaunch forward, backward;
  std::optional<CachedLaunch> packed;  // of the decode kernel that runs the forward, if one does
  bool bhsd;  // q, k and v have their heads before their tokens, out does not
  std::shared_ptr<const KeptMask> mask;  // null: none

  const Axes& axes() const { return bhsd ? kBhsd : kBshd; }  // of q, k and v with a batch
};

// options: Python's number of the options and axes of a call (flashattn3/run/launches.py).
// Returns the passes that were kept for calls with these options and such tensors. It compares
// everything that a plan depends on but strides and addresses.
std::optional<KeptPasses> find_passes(int64_t options, const GivenTensors& tensors);

// Any thread may find and keep passes. Keeps none for tensors that no plan has or kernels do not
// read where they lie.
void keep_passes(int64_t options, const GivenTensors& tensors, const KeptPasses& passes);

// Returns whether a call with these q, k and v saves such tensors, and dout fits its out. Hooks on
// saved tensors may have returned others.
bool are_of_call(const Tensor& dout, const Tensor& out, const Tensor& lse,
                 const GivenTensors& given, const Axes& axes);

}  // namespace flashattn3
