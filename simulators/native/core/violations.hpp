// The log of broken contract rules: what a real driver leaves undefined or answers with a bare code is told in words here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/result.hpp"

namespace hardpoint::simulators {

class Violations {
 public:
  // The call that is being served; its name stands before every text. Must outlive the call.
  void set_call(const char* call) { call_ = call; }

  // Log a broken rule and hand back what the call is to answer.
  Result note(Result result, const char* rule) {
    ++count_;
    if (texts_.size() < kKept) texts_.push_back(std::string(call_) + ": " + rule);
    return result;
  }

  void clear() {
    count_ = 0;
    texts_.clear();
  }

  std::uint64_t count() const { return count_; }
  const std::vector<std::string>& texts() const { return texts_; }

 private:
  // A program in a loop of errors must not fill the host's memory.
  static constexpr std::size_t kKept = 1000;

  const char* call_ = "";
  std::uint64_t count_ = 0;
  std::vector<std::string> texts_;
};

}  // namespace hardpoint::simulators
