// The terms that kernels add to a score after the cap, and types of sinks. The term is a choice of
// the kernel config, since it costs every score an instruction.
#pragma once

namespace flashattn3 {

//   kSlopes: ALiBi, -slope * |distance of query and key|
//   kBias: an element of a tensor
//   kLargest: none, but the kernel looks for the largest score (attention/largest_score.cuh)
enum class ScoreTerm { kNone, kSlopes, kBias, kLargest };

constexpr bool has_slopes(ScoreTerm term) { return term == ScoreTerm::kSlopes; }

// Element type of sinks.
enum class SinkType { kFloat32, kFloat16, kBFloat16 };

}  // namespace flashattn3
