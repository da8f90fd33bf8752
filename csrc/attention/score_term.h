// What is added to a score after the cap. A choice of the kernel config, since it costs every
// score an instruction.
#pragma once

namespace flashattn3 {

//   kSlopes: ALiBi, -slope * |distance of query and key|
//   kBias: an element of a tensor
enum class ScoreTerm { kNone, kSlopes, kBias };

}  // namespace flashattn3
