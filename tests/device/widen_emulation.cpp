// Runs widen_cache on the CPU (emulation/emulation.h) on the problems of decode_check whose cache
// has 8 bits, and on random ones, and compares every element of the 16-bit K and V: those of the
// keys that some query sees are codes times descales, rounded once, all others keep their bits.
//   widen_emulation [count [first]]
//       count: of random problems (100), with seeds from `first` on
// Exit code 0: all correct, 1: wrong values, a deadlock, or no case.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "command_line.h"
#include "decode_cases.h"
#include "forward/widen_cache.cuh"
#include "launch/widen_arguments.h"
#include "run_grid.h"

using namespace flashattn3;

alignas(1024) static uint8_t shared[emulation::kSharedBytes];

constexpr uint16_t kUnwritten = 0x5bad;

static bool same_number(uint16_t found, uint16_t wanted, bool fp16) {
  if (found == wanted) return true;
  return std::isnan(to_float(found, fp16)) && std::isnan(to_float(wanted, fp16));
}

// K or V of the problem, and the memory for some heads of it.
struct Side {
  const DecodeProblem& problem;
  const Tensor& cache;
  const std::vector<float>&of_heads, &of_keys;
  uint16_t lost;  // elements of a key whose page does not exist
  std::vector<uint16_t> found;

  void reset(int heads) {
    const int64_t tokens = int64_t{problem.c.batch} * problem.c.capacity;
    found.assign(tokens * heads * cache.dim + 2 * kGuard, kUnwritten);
  }
  uint16_t* data() { return found.data() + kGuard; }

  uint16_t wanted(int b, int cache_idx, int key, int head, int column) const {
    const DecodeCase& c = problem.c;
    const auto [page, slot] = cache_idx < 0 ? std::pair(-1, 0) : problem.place(cache_idx, key);
    if (page < 0 || page >= problem.num_pages) return lost;
    const uint16_t* row = cache.row(page, slot, head);
    float descale = static_cast<float>(problem.key_descale(of_keys, page, slot, head));
    if (!of_heads.empty()) descale = problem.head_descale(of_heads, b, head);
    return to_bits(problem.cached(row[column]) * descale, c.fp16);
  }

  // Returns an error message, or "". heads: of the memory. fewest: queries of a sequence.
  std::string compare(const char* name, int first_head, int heads, int fewest) const {
    const DecodeCase& c = problem.c;
    std::vector<bool> read(found.size());
    for (int b = 0; b < c.batch; ++b) {
      const DecodeSequence s = problem.sequence(b);
      if (s.num_queries < fewest) continue;
      for (int key = s.first_key; key < s.num_keys; ++key) {
        for (int i = 0; i < heads * cache.dim; ++i) {
          const int64_t at = kGuard + ((int64_t{b} * c.capacity + key) * heads) * cache.dim + i;
          const int head = first_head + i / cache.dim;
          const uint16_t right = wanted(b, s.cache_idx, key, head, i % cache.dim);
          read[at] = true;
          if (same_number(found[at], right, c.fp16)) continue;
          char text[160];
          std::snprintf(text, sizeof(text), "%s: sequence %d key %d head %d column %d: %g, not %g",
                        name, b, key, head, i % cache.dim, to_float(found[at], c.fp16),
                        to_float(right, c.fp16));
          return text;
        }
      }
    }
    for (size_t i = 0; i < found.size(); ++i) {
      if (!read[i] && found[i] != kUnwritten) return std::string(name) + ": written elsewhere";
    }
    return "";
  }
};

struct Turn {
  int num_sms, heads_at_once, unit_keys, fewest_queries;  // unit_keys 0: as launched
};

static std::string run(DecodeProblem& problem, const Turn& turn, uint32_t seed) {
  ByteDecodeParams params = make_params(problem, HostMemory(), nullptr);
  params.num_sms = turn.num_sms;
  params.min_queries = turn.fewest_queries;
  Side k{problem, problem.k, problem.k_descale, problem.k_key_descale, 0x7fff};
  Side v{problem, problem.v, problem.v_descale, problem.v_key_descale, 0};
  for (int first = 0; first < params.num_heads_kv; first += turn.heads_at_once) {
    const int count = std::min(turn.heads_at_once, params.num_heads_kv - first);
    k.reset(count), v.reset(count);
    forward::WidenArguments args =
        make_widen_arguments(params, WidenedHeads{first, count, k.data(), v.data()});
    if (turn.unit_keys > 0) args.unit_keys = turn.unit_keys;
    const auto kernel = [&] {
      if (problem.c.fp16) {
        forward::widen_cache<ElementType::kFloat16>(args);
      } else {
        forward::widen_cache<ElementType::kBFloat16>(args);
      }
    };
    const emulation::Grid grid{num_widen_ctas(params, args), forward::kWidenThreads};
    if (!emulation::run(kernel, grid, seed)) return "deadlock";
    const int fewest = std::max(turn.fewest_queries, 1);
    std::string wrong = k.compare("K", first, count, fewest);
    if (wrong.empty()) wrong = v.compare("V", first, count, fewest);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

// Elements of a problem that the emulation widens in less than a second.
static bool is_small(const DecodeCase& c) {
  return int64_t{c.batch} * c.capacity * c.heads_kv * c.head_dim <= 1 << 20;
}

int main(int argc, char** argv) {
  const int count = argc > 1 ? std::atoi(argv[1]) : 100, seed = argc > 2 ? std::atoi(argv[2]) : 0;
  std::vector<DecodeCase> cases = decode_cases();
  for (int i = seed; i < seed + count; ++i) cases.push_back(random_decode_case(i, 2000));
  emulation::shared_memory = shared;
  Tally tally;
  for (DecodeCase& c : cases) {
    if (!c.has_bytes() || !is_small(c)) continue;
    if (c.page_descales || c.token_descales) c.descales = false;
    DecodeProblem problem(c);
    std::string wrong;
    for (const Turn& turn : {Turn{132, c.heads_kv, 0, 0}, Turn{1, 1, 7, 0}, Turn{2, 2, 64, 5}}) {
      if (wrong.empty()) wrong = run(problem, turn, tally.run + 1);
    }
    std::printf("%s  %s%s%s\n", wrong.empty() ? "PASS" : "FAIL", c.name.c_str(),
                wrong.empty() ? "" : "\n     ", wrong.c_str());
    std::fflush(stdout);
    tally.add(wrong.empty());
  }
  return tally.finish();
}
