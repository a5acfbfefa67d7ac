#include "core/settings.hpp"

#include <cctype>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>

namespace hardpoint::simulators {

namespace {

constexpr std::uint64_t kHostPage = 4096;

bool power_of_two(std::uint64_t value) { return value && !(value & (value - 1)); }

std::string variable_of(const char* name) {
  std::string variable = "HARDPOINT_SIM_";
  for (const char* letter = name; *letter; ++letter) variable += static_cast<char>(std::toupper(*letter));
  return variable;
}

void apply(Settings& settings, const char* name, std::uint64_t value) {
  Settings changed = settings;
  std::uint64_t* field = find_setting(changed, name);
  if (!field) return;
  *field = value;
  if (valid(changed)) settings = changed;
}

}  // namespace

const std::vector<SettingName>& setting_names() {
  static const std::vector<SettingName> names = {
      {"capacity", &Settings::capacity},
      {"devices", &Settings::devices},
      {"granularity", &Settings::granularity},
      {"recommended_granularity", &Settings::recommended_granularity},
      {"shareable_granularity", &Settings::shareable_granularity},
      {"strict_host", &Settings::strict_host},
      {"deferred", &Settings::deferred},
      {"max_chunk", &Settings::max_chunk},
      {"max_reservation", &Settings::max_reservation},
      {"context_rule", &Settings::context_rule},
      {"release_needs_unmap", &Settings::release_needs_unmap},
      {"hold_until_address_free", &Settings::hold_until_address_free},
      {"access_from_first", &Settings::access_from_first},
      {"unmap_waits", &Settings::unmap_waits},
      {"late_mapping", &Settings::late_mapping},
      {"thief", &Settings::thief},
      {"refuse_alignment", &Settings::refuse_alignment},
      {"stale_pages", &Settings::stale_pages},
      {"free_counter_lag", &Settings::free_counter_lag},
      {"match_page_type", &Settings::match_page_type},
      {"virtual_memory", &Settings::virtual_memory},
      {"posix_handles", &Settings::posix_handles},
      {"fabric_handles", &Settings::fabric_handles},
      {"rdma", &Settings::rdma},
      {"unified_memory", &Settings::unified_memory},
      {"graphs_keep_memory", &Settings::graphs_keep_memory},
      {"old_kernel", &Settings::old_kernel},
      {"version", &Settings::version},
  };
  return names;
}

std::uint64_t* find_setting(Settings& settings, const char* name) {
  for (const SettingName& known : setting_names()) {
    if (name && !std::strcmp(known.name, name)) return &(settings.*known.field);
  }
  return nullptr;
}

bool valid(const Settings& settings) {
  const auto granularity_or_none = [&](std::uint64_t value) {
    return value == 0 || (power_of_two(value) && value >= settings.granularity);
  };
  return settings.devices <= kMaxDevices && power_of_two(settings.granularity) && settings.granularity >= kHostPage &&
         granularity_or_none(settings.recommended_granularity) && granularity_or_none(settings.shareable_granularity);
}

Settings from_environment(const Settings& defaults) {
  Settings settings = defaults;
  for (const SettingName& known : setting_names()) {
    const char* value = std::getenv(variable_of(known.name).c_str());
    if (value && *value) apply(settings, known.name, std::strtoull(value, nullptr, 0));
  }
  if (const char* quirks = std::getenv("HARDPOINT_SIM_QUIRKS")) {
    std::istringstream list(quirks);
    for (std::string quirk; std::getline(list, quirk, ',');) apply(settings, quirk.c_str(), 1);
  }
  return settings;
}

}  // namespace hardpoint::simulators
