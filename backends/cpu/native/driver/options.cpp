#include "options.hpp"

#include <charconv>

#include "failure.hpp"

namespace hp::driver {
namespace {

template <typename Integer>
Integer parse_integer(const std::string& key, const std::string& text) {
  Integer value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size())
    refuse("hp_driver_open", "option " + key + " has '" + text + "', which is not a number in range");
  return value;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  size_t start = 0;
  for (size_t end; (end = text.find(separator, start)) != std::string::npos; start = end + 1)
    parts.push_back(text.substr(start, end - start));
  parts.push_back(text.substr(start));
  return parts;
}

Options::Fault parse_fault(const std::string& text) {
  const std::vector<std::string> parts = split(text, ':');
  if (parts.size() != 2 && parts.size() != 3)
    refuse("hp_driver_open", "option fail has '" + text + "' and wants <entry>:<nth>[:<times>]");
  const int64_t nth = parse_integer<int64_t>("fail", parts[1]);
  const int64_t times = parts.size() == 3 ? parse_integer<int64_t>("fail", parts[2]) : 1;
  return {parts[0], nth, times};
}

}  // namespace

Options parse_options(const char* text) {
  Options options;
  if (!text || !*text) return options;
  for (const std::string& part : split(text, ';')) {
    const size_t equals = part.find('=');
    const std::string key = part.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : part.substr(equals + 1);
    if (key == "budget") {
      options.budget = parse_integer<uint64_t>(key, value);
    } else if (key == "streaming") {
      options.streaming = value;
    } else if (key == "keep_address") {
      options.keep_address = parse_integer<int>(key, value) != 0;
    } else if (key == "fail") {
      options.faults.push_back(parse_fault(value));
    } else {
      refuse("hp_driver_open", "option '" + key + "' is unknown; there are budget, streaming, keep_address and fail");
    }
  }
  return options;
}

}  // namespace hp::driver
