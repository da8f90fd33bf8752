// Description of one problem of forward_check or backward_check.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "case_table.h"

// kOpposite: all keys have nearly equal weight, and dout has opposite signs in the first and the
// second half of the heads: dV of a query head is beyond fp16, that of a KV head is not.
enum class Data { kNormal, kGrowsToFirst, kGrowsToLast, kOutlier, kConstant, kLarge, kOpposite };

struct Case {
  std::string name;
  bool fp16 = false;
  int batch = 1, seqlen_q = 128, seqlen_k = 128;
  int heads_q = 1, heads_kv = 1, head_dim = 128, head_dim_v = 0;  // 0: head_dim
  int left = -1, right = -1;
  float softcap = 0.f;
  float scale = NAN;  // NaN: head_dim ^ -0.5
  Data data = Data::kNormal;
  int bias_batch = 0, bias_heads = 0;    // of a bias, each 1 or as many as q has; 0: none
  bool sinks = false, slopes = false;    // of Inputs
  int lists_batch = 0, lists_heads = 0;  // of a RandomMask, each 1 or as many as q has; 0: none
  bool head_major = false;               // memory order (batch, heads, seq)
  int pitch_padding = 0;                 // NaN elements after each head's columns
  std::vector<int> cu_q, cu_k;           // cumulative lengths, as given to the kernel
  std::vector<int> used_q, used_k;       // seqused
  int total_q = 0, total_k = 0;          // tokens of the tensors with cu_q, cu_k
  // Read by backward_check.
  bool dlse = false;           // lse has a gradient
  bool other_strides = false;  // gradients in the other memory order, with more padding
};

inline std::vector<Case> with_defaults(std::vector<Case> cases) {
  for (Case& c : cases) {
    if (c.head_dim_v == 0) c.head_dim_v = c.head_dim;
    if (std::isnan(c.scale)) c.scale = 1.f / std::sqrt(static_cast<float>(c.head_dim));
  }
  return cases;
}

inline void set(Case& c, Field& field) {
  std::string data;
  const bool known =
      read_mask(field, c.left, c.right) || field.read("fp16", c.fp16) ||
      field.read("batch", c.batch) || field.read("q", c.seqlen_q) || field.read("k", c.seqlen_k) ||
      field.read("heads", c.heads_q, c.heads_kv) || field.read("d", c.head_dim, c.head_dim_v) ||
      field.read("softcap", c.softcap) || field.read("scale", c.scale) ||
      field.read("bias", c.bias_batch, c.bias_heads) ||
      field.read("lists", c.lists_batch, c.lists_heads) || field.read("data", data) ||
      field.read("sinks", c.sinks) || field.read("slopes", c.slopes) ||
      field.read("head_major", c.head_major) || field.read("padding", c.pitch_padding) ||
      field.read("cu_q", c.cu_q) || field.read("cu_k", c.cu_k) || field.read("used_q", c.used_q) ||
      field.read("used_k", c.used_k) || field.read("total", c.total_q, c.total_k) ||
      field.read("dlse", c.dlse) || field.read("other_strides", c.other_strides);
  const std::vector<std::string> names = {"normal",   "grows_to_first", "grows_to_last", "outlier",
                                          "constant", "large",          "opposite"};
  const auto found = std::find(names.begin(), names.end(), data);
  if (!known || (!data.empty() && found == names.end())) field.refuse();
  if (!data.empty()) c.data = static_cast<Data>(found - names.begin());
}
