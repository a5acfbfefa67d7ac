// How the driver's own parts report errors; driver.cpp turns them into statuses.
#pragma once
#include <hardpoint/driver.h>

#include <cstdint>
#include <string>

namespace hp::driver {

struct Failure {
  hp_status status;
  int64_t code;  // errno, or 0 where no system call was made
  const char* call;
  std::string text;
};

[[noreturn]] inline void refuse(const char* call, std::string text) {
  throw Failure{HP_INVALID, 0, call, std::move(text)};
}

}  // namespace hp::driver
