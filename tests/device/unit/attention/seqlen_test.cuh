// attention/seqlen.cuh against the host's implementation of the rule for cu_seqlens and seqused.
#pragma once

#include "../../tensors.h"
#include "../unit.cuh"
#include "attention/seqlen.cuh"

namespace unit::seqlen {

using namespace flashattn3;

struct Case {
  std::vector<int> cu, used;  // empty: not given
  int longest, total, batch;
};

// Lengths 0, tables that go backwards, below 0 and past the tensor, and used lengths that exceed
// the sequence: whatever they hold, the rows found are inside the tensor.
inline std::vector<Case> all_cases() {
  return {{{}, {}, 100, 0, 2},
          {{}, {0, 100, 101, -1, 37}, 100, 0, 5},
          {{0, 5, 5, 17, 20}, {}, 12, 20, 4},
          {{0, 5, 5, 17, 20}, {5, 3, 4, 0}, 12, 20, 4},
          {{0, 30, 10, 40, 90}, {}, 25, 50, 4},
          {{-7, -1, 3, 3, 60}, {9, 9, 9, 9}, 100, 50, 4},
          {{70, 80, 2147483647}, {}, 100, 50, 2},
          {{0, 0}, {0}, 0, 0, 1}};
}

inline void check_rows(Result& result) {
  for (const Case& c : all_cases()) {
    const SequenceTable table{c.cu.empty() ? nullptr : c.cu.data(),
                              c.used.empty() ? nullptr : c.used.data(), c.longest, c.total};
    for (int b = 0; b < c.batch; ++b) {
      const Sequence found = find_sequence(table, b);
      const Rows wanted = find_rows(c.cu, c.used, c.longest, c.total, b);
      result.equal(wanted.offset, found.offset, "offset", b, c.total);
      result.equal(wanted.length, found.length, "length", b, c.total);
      const int rows = c.cu.empty() ? c.longest : c.total;
      const bool inside = found.offset >= 0 && found.length >= 0 &&
                          found.offset + found.length <= rows && found.length <= c.longest;
      result.equal(true, inside, "rows inside the tensor", b, c.total);
    }
  }
}

static const Tests kTests = {{"attention/seqlen: rows", Where::kHost, check_rows}};

}  // namespace unit::seqlen
