// Options of a program: `--name value` and `--flag`.
#pragma once

#include <cstdlib>
#include <cstring>

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
