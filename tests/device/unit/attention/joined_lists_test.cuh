// attention/joined_lists.cuh, what the host can run: the order of stages. forward_emulation runs
// the rest.
#pragma once

#include <vector>

#include "../unit.cuh"
#include "attention/joined_lists.cuh"

namespace unit::joined_lists {

using namespace flashattn3;

// Each stage of an owner once, in order, and each list walks over those that it has.
inline void check_stages(Result& result) {
  for (int number = 0; number < 5 * 5 * 5; ++number) {
    const int counts[3] = {number % 5, number / 5 % 5, number / 25};
    const JoinedStages stages = JoinedStages::of(counts[0], counts[1], counts[2]);
    result.equal(counts[0] + counts[1] + counts[2], stages.count(), "stages", number);
    int seen[3] = {0, 0, 0};
    std::vector<int> owners;
    for (int i = 0; i < stages.count(); ++i) {
      int before;
      owners.push_back(stages.owner(i, before));
      result.equal(seen[owners[i]]++, before, "stages before", number, i);
    }
    for (int owner = 0; owner < 3; ++owner) {
      result.equal(counts[owner], seen[owner], "stages of an owner", number, owner);
    }
    for (int list = 0; list < 2; ++list) {
      std::vector<int> expected, found;
      for (int i = 0; i < stages.count(); ++i) {
        if (owners[i] != 1 - list) expected.push_back(i);
      }
      for (JoinedWalk at(stages, list); at.has_this(); at.advance()) {
        if (!found.empty()) {
          result.equal(at.position - found.back() - 1, at.has_passed, "passed", number, list);
        }
        found.push_back(at.position);
        result.equal(1, at.has_next() == (at.position < at.last), "next", number, list);
      }
      result.equal(1, expected == found, "walk", number, list);
    }
  }
}

static const Tests kTests = {{"attention/joined_lists: stages", Where::kHost, check_stages}};

}  // namespace unit::joined_lists
