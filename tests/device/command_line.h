// Options of a program: `--name value` and `--flag`, and the cases that it runs.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

class CommandLine {
 public:
  CommandLine(int argc, char** argv) : count_(argc), words_(argv) {}

  bool has(const char* flag) const { return find(flag) > 0; }
  // The word `place` words after the name, unless it is an option or there is none.
  const char* text(const char* name, const char* otherwise = "", int place = 1) const {
    const int at = find(name) + place;
    const bool given = has(name) && at < count_ && std::strncmp(words_[at], "--", 2) != 0;
    return given ? words_[at] : otherwise;
  }
  int number(const char* name, int otherwise = 0, int place = 1) const {
    const char* word = text(name, nullptr, place);
    return word == nullptr ? otherwise : std::atoi(word);
  }

 private:
  int find(const char* name) const {
    for (int i = count_ - 1; i > 0; --i) {
      if (!std::strcmp(words_[i], name)) return i;
    }
    return 0;
  }

  int count_;
  char** words_;
};

// Cases that have run.
struct Tally {
  int run = 0, failed = 0;

  void add(bool good) { ++run, failed += !good; }
  void add(const Tally& more) { run += more.run, failed += more.failed; }
  // Prints the numbers. Returns the program's exit code: 1 if a case failed or none ran.
  int finish() const {
    std::printf("%d cases, %d failed\n", run, failed);
    return failed != 0 || run == 0;
  }
};

inline bool has_part(const std::string& name, const char* part) {
  return name.find(part) != std::string::npos;
}

// Runs the named cases or, with `--random count`, as many random ones, from `--from` on, that have
// the part after `--only` in their name. run_case(case, index): whether it is right; nullopt: the
// program leaves it out.
template <class Case, class RandomCase, class RunCase>
Tally run_cases(const CommandLine& given, const std::vector<Case>& named, RandomCase random_case,
                RunCase run_case) {
  const int random = given.number("--random"), from = given.number("--from");
  const int count = random > 0 ? from + random : static_cast<int>(named.size());
  Tally tally;
  for (int i = from; i < count; ++i) {
    const Case c = random > 0 ? random_case(i) : named[i];
    if (!has_part(c.name, given.text("--only"))) continue;
    if (const std::optional<bool> good = run_case(c, i)) tally.add(*good);
  }
  return tally;
}

template <class Case, class RunCase>
Tally run_cases(const CommandLine& given, const std::vector<Case>& named, RunCase run_case) {
  const auto none = [](int) -> Case {
    std::fprintf(stderr, "this program has no random cases\n");
    std::exit(1);
  };
  return run_cases(given, named, none, run_case);
}
