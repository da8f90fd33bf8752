// What backward_check and backward_emulation share: the parameters of a problem's launch, and
// checks of its results besides their values.
#pragma once

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "backward_configs.h"
#include "backward_problem.h"
#include "launch/params.h"

// memory: returns where the kernels can read a vector or a tensor.
template <class Memory>
flashattn3::BackwardParams make_params(BackwardProblem& p, Memory& memory) {
  const Case& c = p.c;
  p.clear_results();
  flashattn3::BackwardParams params{};
  flashattn3::ForwardParams& f = params.forward = p.params(p.out, memory);
  f.lse = const_cast<float*>(memory(p.lse));
  f.varlen_schedule = const_cast<int32_t*>(memory(p.schedule));
  if (c.bias_heads != 0) {
    f.bias = {memory(p.bias), p.bias.stride, c.bias_batch == 1, c.bias_heads == 1};
    params.dbias = memory(p.dbias);
    if (num_bias_terms(f) > 2) params.ds = memory(p.ds);
  }
  params.dout = memory(p.dout), params.dlse = c.dlse ? memory(p.dlse) : nullptr;
  params.dq = memory(p.dq), params.dk = memory(p.dk), params.dv = memory(p.dv);
  params.dout_stride = p.dout.stride, params.dlse_stride = p.dlse_stride();
  params.dq_stride = p.dq.stride, params.dk_stride = p.dk.stride, params.dv_stride = p.dv.stride;
  params.dsinks = const_cast<float*>(memory(p.dsinks));
  if (p.mask.heads != 0) params.lists = p.lists.params(memory);
  params.turns = memory(p.lists.turns);
  return params;
}

// Indices of the kernel configs of a case's dtype with the smallest sufficient head dim.
inline std::vector<int> configs_of(const Case& c) {
  return smallest_configs(flashattn3::kCheckConfigs, c.head_dim, [&](const auto& config) {
    const bool has_slopes = config.term == flashattn3::ScoreTerm::kSlopes;
    return (config.dtype == flashattn3::kFp16) == c.fp16 && has_slopes == c.slopes &&
           has_bias(config) == (c.bias_heads != 0) && config.listed == (c.lists_heads != 0) &&
           config.head_dim_v >= c.head_dim_v;
  });
}

// Returns an error message, or "".
inline std::string check_coverage(BackwardProblem& p, const Gradient& g) {
  const auto rows_of = [&](int b) { return p.rows_of(g, b); };
  const bool varlen = !p.c.cu_q.empty();
  const std::vector<uint8_t> owners = owners_of(p.tensor(g), p.batch_of(g), rows_of, varlen, true);
  return check_coverage(g.name, p.tensor(g), owners, p.c.fp16);
}

// Compares the gradients of several runs with fp64. Those of dk and dv must have the same bits in
// all nondeterministic runs with as many parts of the query heads (their number depends on that of
// the SMs); dk and dv likewise in deterministic runs, and dq in all of these.
struct GradientChecks {
  std::map<std::array<int, 3>, std::vector<uint16_t>> first;  // (gradient, deterministic, parts)
  double ratio[4] = {};  // error / bound; the worst of all runs

  // Returns error messages, or none.
  std::vector<std::string> compare(BackwardProblem& p, bool deterministic, int num_parts) {
    std::vector<std::string> wrong;
    const auto add = [&](const std::string& text) {
      if (!text.empty()) wrong.push_back(text);
    };
    BackwardReference& r = p.reference;
    Gradient* gradients[] = {&r.dq, &r.dk, &r.dv, &r.dbias};
    for (int i = 0; i < 4; ++i) {
      Gradient& g = *gradients[i];
      auto& bits = first[{i, deterministic, i > 0 ? num_parts : 0}];
      if (bits.empty()) {
        bits = p.tensor(g).host;
      } else if (i > 0 || deterministic) {
        if (bits == p.tensor(g).host) continue;
        add(std::string("other bits of ") + g.name + ": " + ::compare(p, g, &bits).describe());
      }
      add(check_coverage(p, g));
      const Worst worst = ::compare(p, g);
      ratio[i] = std::max(ratio[i], worst.ratio);
      if (worst.wrong > 0) add(std::string(g.name) + ": " + worst.describe());
    }
    add(check_sinks(p));
    return wrong;
  }

  std::string bounds() const {
    char text[80];
    std::snprintf(text, sizeof(text), "of the bounds: dq %.2f dk %.2f dv %.2f dbias %.2f", ratio[0],
                  ratio[1], ratio[2], ratio[3]);
    return text;
  }
};
