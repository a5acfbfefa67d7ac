// What can go wrong in a memory operation, as one exception type that the binding turns into the typed Python errors.
#pragma once
#include <cstdint>
#include <exception>
#include <string>
#include <utility>

namespace hardpoint::memory {

enum class Fault {
  kOutOfMemory,
  kBudgetExceeded,
  kDriverCall,
  kUnknownTag,
  kAsleep,
  kBusy,
  kEnded,
  kInvalid,
  kForeign,
  kCorrupt,
  kStale,
  kForked,
  kClosed,
  kRefused,
};

class MemoryFault : public std::exception {
 public:
  // problem: what was asked and could not be done; found: what was found instead; hint: what to do about it.
  MemoryFault(Fault kind, std::string problem, std::string found = {}, std::string hint = {})
      : kind_(kind), problem_(std::move(problem)), found_(std::move(found)), hint_(std::move(hint)) {}

  // A call of the vendor's, or of the system's, that failed.
  static MemoryFault driver_call(std::string call, int64_t code, std::string text, std::string hint = {}) {
    MemoryFault fault(Fault::kDriverCall, "driver call " + call + " failed", text, std::move(hint));
    fault.call_ = std::move(call);
    fault.code_ = code;
    return fault;
  }

  Fault kind() const { return kind_; }
  const std::string& problem() const { return problem_; }
  const std::string& found() const { return found_; }
  const std::string& hint() const { return hint_; }
  const std::string& call() const { return call_; }
  int64_t code() const { return code_; }
  const char* what() const noexcept override { return problem_.c_str(); }

  // Adds to what was found; used where undoing met a second failure.
  void append(const std::string& text) { found_ += found_.empty() ? text : "; " + text; }

 private:
  Fault kind_;
  std::string problem_, found_, hint_, call_;
  int64_t code_ = 0;
};

}  // namespace hardpoint::memory
