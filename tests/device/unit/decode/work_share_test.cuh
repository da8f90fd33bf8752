// decode/work_share.cuh, decode/packed_tile.cuh and decode/workspace.h: every KV block of every
// work tile is read once, the CTAs that share a work tile know of each other, and no two parts
// share a slot or a counter.
#pragma once

#include <climits>
#include <map>
#include <set>
#include <tuple>

#include "../unit.cuh"
#include "decode/find_share.cuh"
#include "decode/packed_tile.cuh"
#include "decode/work_share.cuh"
#include "decode/workspace.h"

namespace unit::work_share {

using namespace flashattn3;
using namespace flashattn3::decode;

constexpr int kBlockN = 64;
constexpr int kShareThreads = 256;

// A batch of sequences, and the tables that the arguments point to.
struct Batch {
  std::vector<int32_t> seqlens, leftpad, cache_idx, cu_q, cu_new;
  Arguments args{};

  Batch(uint32_t seed, int batch, int qheads_per_kvhead, bool varlen) {
    std::mt19937 random(seed);
    const auto below = [&](int bound) { return static_cast<int>(random() % bound); };
    args.capacity = 1 + below(3000);
    args.batch = batch;
    args.max_queries = below(3) ? INT_MAX : 1 + below(70);
    args.num_heads_kv = 1 + below(4);
    args.qhead_per_kvhead = qheads_per_kvhead;
    args.rows = PackedRows::of(qheads_per_kvhead);
    args.num_caches = batch;
    args.window_left = below(2) ? INT_MAX : below(400);
    args.window_right = below(2) ? INT_MAX : 0;
    args.whole_tiles = below(4) == 0;
    const int longest = 1 + below(70);
    cu_q.push_back(0), cu_new.push_back(0);
    for (int b = 0; b < batch; ++b) {
      seqlens.push_back(below(5) == 0 ? 0 : below(args.capacity + 10) - 2);  // -2: out of range
      leftpad.push_back(below(3) == 0 ? below(args.capacity) : 0);
      cache_idx.push_back(below(20) == 0 ? batch : below(batch));
      cu_q.push_back(cu_q.back() + below(longest + 1));
      cu_new.push_back(cu_new.back() + below(3));
    }
    args.cache_seqlens = seqlens.data();
    if (below(2)) args.cache_leftpad = leftpad.data();
    if (below(2)) args.cache_batch_idx = cache_idx.data();
    if (below(2)) args.cu_seqlens_k_new = cu_new.data();
    args.seqlens_q = {varlen ? cu_q.data() : nullptr, nullptr, longest, cu_q.back()};
  }
  Batch(const Batch&) = delete;

  // Sets the shares of a launch; about num_ctas CTAs. share_heads divides the KV heads.
  void divide(int num_ctas, int share_heads) {
    const int num_shares = std::max(1, num_ctas / share_heads);
    args.num_shares = cutlass::FastDivmod(num_shares);
    args.share_heads = cutlass::FastDivmod(share_heads);
    args.head_groups = args.num_heads_kv / share_heads;
  }
  int num_ctas() const { return args.num_shares * args.share_heads; }
};

// The share of a CTA as find_share computes it, by a loop over the sequences.
inline WorkShare share_of(const Arguments& args, int block) {
  int total = 0;
  const auto sequence = [&](int b) { return find_cached_sequence<kBlockN>(args, b); };
  for (int b = 0; b < args.batch; ++b) total += units_of_sequence<0>(args, sequence(b));
  WorkShare share{};
  share.set<0>(total, block, args);
  int first = 0;
  for (int b = 0; b < args.batch; ++b) {
    const int units = units_of_sequence<0>(args, sequence(b));
    if (first <= share.begin && share.begin < first + units) {
      share.batch_idx = b, share.first_unit = first, share.sequence = sequence(b);
    }
    first += units;
  }
  return share;
}

struct WorkTileId {
  int batch_idx, kv_head, row_tile;
  auto operator<=>(const WorkTileId&) const = default;
};

inline void check_batch(Result& result, const Batch& batch) {
  const Arguments& args = batch.args;
  const int num_ctas = batch.num_ctas();
  struct Found {
    std::map<int, int> blocks;  // KV block, number of parts that have it
    std::vector<std::pair<int, Part>> parts;
  };
  std::map<WorkTileId, Found> tiles;
  std::set<int> slots;
  int most = 0, least = INT_MAX;
  for (int block = 0; block < num_ctas; ++block) {
    const WorkShare share = share_of(args, block);
    const int cta = share.cta;
    WorkShare left = share;
    Part part;
    int units = 0;
    while (take_part<kBlockN>(args, left, part)) {
      Found& found = tiles[{part.batch_idx, part.kv_head, part.row_tile}];
      for (int block = part.n_blocks.begin; block < part.n_blocks.end; ++block) {
        ++found.blocks[block];
      }
      found.parts.push_back({cta, part});
      units += args.whole_tiles ? 1 : part.n_blocks.end - part.n_blocks.begin;
      if (part.num_ctas > 1) {
        const int slot = partial_of(cta, part.first_cta);
        result.equal(1, slots.insert(slot).second, "a slot has one part", slot);
        result.equal(1, slot < num_partials(num_ctas), "slot below their number", slot);
      }
    }
    result.equal(share.end - share.begin, units, "units of a CTA", cta);
    most = std::max(most, units), least = std::min(least, units);
  }
  result.equal(1, most - least <= 1, "shares are equal");

  // The work tiles that there are, from the lengths alone.
  size_t num_tiles = 0;
  for (int b = 0; b < args.batch; ++b) {
    const CachedSequence sequence = find_cached_sequence<kBlockN>(args, b);
    const int of_head = sequence.num_tiles / args.head_groups;
    const int tiles_of_sequence = of_head * args.num_heads_kv;
    num_tiles += tiles_of_sequence;
    std::set<std::tuple<int, int>> rows;  // (query, head) of q
    for (int tile = 0; tile < tiles_of_sequence; ++tile) {
      const WorkTileId id{b, tile / of_head, tile % of_head};
      const auto found = tiles.find(id);
      result.equal(1, found != tiles.end(), "the work tile is computed", b, tile);
      if (found == tiles.end()) continue;
      const std::map<int, int>& blocks = found->second.blocks;
      result.equal(sequence.n_blocks.end - sequence.n_blocks.begin, blocks.size(),
                   "KV blocks of a work tile", b, tile);
      for (const auto& [block, count] : blocks) {
        result.equal(1, count, "times that a KV block is read", b, block);
        result.equal(1, sequence.n_blocks.has(block), "the KV block may be visible", b, block);
      }
      const auto& parts = found->second.parts;
      const int first_cta = parts.front().first;
      for (size_t i = 0; i < parts.size(); ++i) {
        result.equal(first_cta + static_cast<int>(i), parts[i].first, "CTAs follow each other", b);
        result.equal(first_cta, parts[i].second.first_cta, "first_cta", b, tile);
        result.equal(parts.size(), parts[i].second.num_ctas, "num_ctas", b, tile);
      }
      const PackedTile packed = PackedTile::of(args, sequence, parts.front().second);
      for (int row = 0; row < kBlockM; ++row) {
        if (!packed.has(row)) continue;
        const bool is_new = rows.insert({packed.query_of(row), packed.head_of(row)}).second;
        result.equal(1, is_new, "a row is in one work tile", b, row);
        result.equal(id.kv_head, packed.head_of(row) / args.qhead_per_kvhead, "its KV head", b);
      }
    }
    const int heads = args.num_heads_kv * args.qhead_per_kvhead;
    const int num_rows = sequence.num_queries > args.max_queries ? 0 : sequence.num_queries * heads;
    result.equal(num_rows, rows.size(), "rows of a sequence", b);
  }
  result.equal(num_tiles, tiles.size(), "work tiles");
}

inline void check_shares(Result& result) {
  uint32_t seed = 1;
  for (const int batch : {1, 2, 7, 40}) {
    for (const int qheads_per_kvhead : {1, 4, 5, 8, 64, 80, 128}) {
      for (const bool varlen : {false, true}) {
        Batch problem(++seed, batch, qheads_per_kvhead, varlen);
        for (const int num_ctas : {1, 3, 16, 132}) {
          for (const int share_heads : {1, 2, 3, 4}) {
            if (problem.args.num_heads_kv % share_heads != 0) continue;
            problem.divide(num_ctas, share_heads);
            check_batch(result, problem);
          }
        }
      }
    }
  }
}

// The groups of workspace.h: each counter gets as many arrivals as it waits for, and belongs to one
// group of one work tile.
inline void check_groups(Result& result) {
  for (const int wanted_ctas : {1, 16, 17, 132, 256}) {
    Batch batch(7 + wanted_ctas, 3, 8, false);
    batch.divide(wanted_ctas, wanted_ctas % 2 ? 1 : batch.args.num_heads_kv);
    const int num_ctas = batch.num_ctas();
    std::map<int, std::pair<int, int>> arrivals;  // counter: arrivals, and how many it waits for
    std::map<int, std::tuple<int, int, int, int>> owner;
    Counters counters;
    for (int block = 0; block < num_ctas; ++block) {
      WorkShare share = share_of(batch.args, block);
      const int cta = share.cta;
      Part part;
      while (take_part<kBlockN>(batch.args, share, part)) {
        if (part.num_ctas == 1) continue;
        const ArrivalGroup group = ArrivalGroup::of(cta, part);
        const auto arrive = [&](const uint64_t* at, int leader, int expected) {
          const int counter = static_cast<int>(at - counters.tiles);
          auto& [count, wanted] = arrivals[counter];
          ++count, wanted = expected;
          const std::tuple id{part.batch_idx, part.kv_head, part.row_tile, leader};
          result.equal(1, owner.insert({counter, id}).first->second == id, "owner", counter);
        };
        arrive(group.counter(counters, part), group.leader, group.num_ctas);
        const int num_groups = ArrivalGroup::count(part.num_ctas);
        if (num_groups > 1 && group.leader == cta) {
          arrive(ArrivalGroup::counter_of_groups(counters, part), -1, num_groups);
        }
        const int most = part.num_ctas <= kMostInOneGroup ? kMostInOneGroup : kGroup;
        result.equal(1, group.num_ctas <= most, "CTAs of a group");
      }
    }
    for (const auto& [counter, pair] : arrivals) {
      result.equal(pair.second, pair.first, "arrivals at a counter", counter, num_ctas);
    }
    result.equal(1, num_ctas > 0, "ran");
  }
}

// find_share against the loop above.
__global__ void share_kernel(const __grid_constant__ Arguments args, WorkShare* shares) {
  __shared__ struct {
    int warp_sums[kShareThreads / 32];
    WorkShare share;
  } storage;
  find_share<kBlockN>(args, storage);
  if (threadIdx.x == 0) shares[blockIdx.x] = storage.share;
}

inline void check_find_share(Result& result) {
  for (const int batch : {1, 5, 384, 385, 1000}) {
    Batch host(batch, batch, 4, batch % 2 == 0);
    Batch device(batch, batch, 4, batch % 2 == 0);
    Array<int32_t> seqlens(host.seqlens), leftpad(host.leftpad), cu_q(host.cu_q),
        cu_new(host.cu_new);
    device.args.cache_seqlens = seqlens.device();
    if (device.args.cache_leftpad) device.args.cache_leftpad = leftpad.device();
    if (device.args.cu_seqlens_k_new) device.args.cu_seqlens_k_new = cu_new.device();
    if (device.args.seqlens_q.cu_seqlens) device.args.seqlens_q.cu_seqlens = cu_q.device();
    device.args.cache_batch_idx = host.args.cache_batch_idx = nullptr;
    for (const int num_ctas : {1, 132}) {
      host.divide(num_ctas, num_ctas == 1 ? 1 : host.args.num_heads_kv);
      device.divide(num_ctas, num_ctas == 1 ? 1 : device.args.num_heads_kv);
      const auto shares = results_of<WorkShare>(host.num_ctas(), share_kernel, host.num_ctas(),
                                                kShareThreads, 0, device.args);
      for (int cta = 0; cta < host.num_ctas(); ++cta) {
        const WorkShare wanted = share_of(host.args, cta);
        const WorkShare& found = shares[cta];
        result.equal(wanted.begin, found.begin, "begin", cta, batch);
        result.equal(wanted.end, found.end, "end", cta, batch);
        if (wanted.begin == wanted.end) continue;
        result.equal(wanted.batch_idx, found.batch_idx, "batch_idx", cta, batch);
        result.equal(wanted.first_unit, found.first_unit, "first_unit", cta, batch);
      }
    }
  }
}

static const Tests kTests = {{"decode/work_share: shares", Where::kHost, check_shares},
                             {"decode/work_share: groups of CTAs", Where::kHost, check_groups},
                             {"decode/work_share: find_share", Where::kGpu, check_find_share}};

}  // namespace unit::work_share
