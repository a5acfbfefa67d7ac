#include "settings.hpp"

#include <limits>

namespace hp::driver {
namespace {

using hardpoint::driver::Options;
using hardpoint::driver::parse_number;

constexpr uint64_t kMostCalls = std::numeric_limits<int64_t>::max();

std::vector<std::string> split(const std::string &text, char separator) {
  std::vector<std::string> parts;
  size_t start = 0;
  for (size_t end; (end = text.find(separator, start)) != std::string::npos; start = end + 1)
    parts.push_back(text.substr(start, end - start));
  parts.push_back(text.substr(start));
  return parts;
}

Settings::Fault parse_fault(const std::string &text) {
  const std::vector<std::string> parts = split(text, ':');
  if (parts.size() != 2 && parts.size() != 3)
    hardpoint::driver::refuse("hp_driver_open", "option fail is '" + text + "', not <entry>:<nth>[:<times>]");
  const uint64_t nth = parse_number("the number in option fail", parts[1], 1, kMostCalls);
  const uint64_t times = parts.size() == 3 ? parse_number("the count in option fail", parts[2], 0, kMostCalls) : 1;
  return {parts[0], static_cast<int64_t>(nth), static_cast<int64_t>(times)};
}

}  // namespace

Settings Settings::from(Options &options) {
  Settings settings;
  std::string text;
  if (options.take("budget", &text))
    settings.budget = parse_number("option budget", text, 0, std::numeric_limits<uint64_t>::max());
  if (options.take("streaming", &text)) settings.streaming = text;
  if (options.take("keep_address", &text)) settings.keep_address = parse_number("option keep_address", text, 0, 1) != 0;
  if (options.take("fail", &text)) settings.faults.push_back(parse_fault(text));
  return settings;
}

}  // namespace hp::driver
