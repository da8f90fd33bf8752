// Counters of the CTAs of cached calls, of which a stream or a captured graph has its own
// (launch/stream_counters.h). No length decides what a launch leaves behind.
#pragma once

#include <cstdint>

namespace flashattn3::decode {

struct Counters {
  // Compute capability 9.0 has up to 144 SMs; two CTAs of a decode kernel may share one.
  static constexpr int kMostSms = 144;
  static constexpr int kMostCtas = 2 * kMostSms;
  static constexpr int kGroup = 16;  // neighbouring parts that are combined first (workspace.h)

  int32_t tile[2];             // of a forward kernel, TileSchedulerParams::tile_counter
  uint32_t started[kMostSms];  // of a warp kernel, a counter for each KV head; 0 between launches
  // The decode kernels use the rest. launch: the number of launches so far times 2^16, plus the
  // CTAs that have started during a launch. The others hold the number of the last launch that used
  // the counter times 2^16, plus its arrivals; a later launch reads them as 0. 2^48 launches take
  // 40 years.
  uint64_t launch;
  uint64_t tiles[kMostCtas];                 // of the work tile that begins in this CTA
  uint64_t groups[kMostCtas / kGroup];       // of a group of parts whose first CTA is one of 16
  uint64_t tile_groups[kMostCtas / kGroup];  // of the groups of a work tile, by its first CTA
  uint64_t finished;         // CTAs of a kernel with spans that arrive at no more counters
  uint64_t left[kMostCtas];  // not 0 past the number of the launch: the CTA joins nothing
};

}  // namespace flashattn3::decode
