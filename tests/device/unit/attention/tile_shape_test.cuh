// attention/tile_shape.h: the number of work tiles against slices that are dealt one by one.
#pragma once

#include "../unit.cuh"
#include "attention/tile_shape.h"

namespace unit::tile_shape {

using namespace flashattn3;

// Work tiles of a sequence against slices that are dealt one after the other, and the bound for
// sequences that share their tokens.
inline void check_num_blocks(Result& result) {
  for (const TileShape shape :
       {TileShape{128}, {192}, {64, 3, 1}, {64, 3, 4}, {64, 2, 8}, {64, 3, 5}}) {
    for (const std::vector<int>& lengths : {std::vector<int>{0},
                                            {1},
                                            {63, 64, 65},
                                            {256},
                                            {1, 1, 1, 1, 1},
                                            {0, 191, 192, 193, 1000}}) {
      int64_t all = 0, tokens = 0;
      for (const int length : lengths) {
        int tiles = 0, dealt = 0;
        for (int row = 0; row < length; row += shape.rows) {
          for (int head = 0; head < shape.heads; ++head) tiles += dealt++ % shape.slices == 0;
        }
        result.equal(tiles, static_cast<int>(shape.num_blocks(length)), "num_blocks", length,
                     shape.heads);
        all += tiles, tokens += length;
      }
      const int64_t batch = static_cast<int64_t>(lengths.size());
      result.equal(true, shape.most_blocks(tokens, batch) >= all, "most_blocks", shape.heads);
      const int64_t least = tokens * shape.heads / (int64_t{shape.rows} * shape.slices);
      const int64_t loosest = least + batch * (shape.heads + 1);
      result.equal(true, shape.most_blocks(tokens, batch) <= loosest, "most_blocks", shape.heads);
    }
  }
}

static const Tests kTests = {{"attention/tile_shape: work tiles", Where::kHost, check_num_blocks}};

}  // namespace unit::tile_shape
