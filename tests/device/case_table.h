// Cases written as a table: one a line, `name | field values, field values`.
#pragma once

#include <climits>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

class Field {
 public:
  explicit Field(const std::string& text) : words_(text) { words_ >> name_; }

  // Whether the field has this name; then its numbers are read, and values without one are kept.
  template <class... Value>
  bool read(const char* name, Value&... values) {
    if (name_ != name) return false;
    (set(values), ...);
    std::string rest;
    if (words_ >> rest) refuse();
    return true;
  }
  void refuse() const {
    std::fprintf(stderr, "no such field, or too many values: %s\n", words_.str().c_str());
    std::abort();
  }

 private:
  void set(bool& value) { value = true; }
  void set(std::string& value) { words_ >> value; }
  void set(float& value) {
    if (std::string word; words_ >> word) value = std::stof(word);
  }
  bool set(int& value) {
    std::string word;
    if (!(words_ >> word)) return false;
    value = word == "max" ? INT_MAX : word == "min" ? INT_MIN : std::stoi(word);
    return true;
  }
  void set(std::vector<int>& values) {
    for (int value; set(value);) values.push_back(value);
  }

  std::istringstream words_;
  std::string name_;
};

// A mask is `causal` or `window LEFT RIGHT`, -1 without a limit.
inline bool read_mask(Field& field, int& left, int& right) {
  bool causal = false;
  if (field.read("causal", causal)) right = 0;
  return causal || field.read("window", left, right);
}

// set(Case&, Field&) of the type reads one field. A line that begins with a blank continues the one
// before; # begins a comment.
template <class Case>
std::vector<Case> read_cases(const char* table) {
  std::vector<Case> cases;
  std::istringstream lines(table);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line[0] == '#') continue;
    if (line[0] != ' ') {
      const std::string name = line.substr(0, line.find('|'));
      cases.push_back({.name = name.substr(0, name.find_last_not_of(' ') + 1)});
      line.erase(0, name.size() + 1);
    }
    std::istringstream fields(line);
    for (std::string field; std::getline(fields, field, ',');) {
      if (field.find_first_not_of(' ') == std::string::npos) continue;
      Field read(field);
      set(cases.back(), read);
    }
  }
  return cases;
}
