#include "core/calls.hpp"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <thread>

namespace hardpoint::simulators {

namespace {

// Global because the functions of a C library are. Entries are added while libraries are loaded, and never taken away.
std::atomic<CallSite*> first_site{nullptr};

std::string without_version(const std::string& name) {
  const std::size_t mark = name.rfind("_v");
  if (mark == std::string::npos || mark + 2 == name.size()) return name;
  return name.find_first_not_of("0123456789", mark + 2) == std::string::npos ? name.substr(0, mark) : name;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

}  // namespace

CallSite::CallSite(const char* name) : name_(name), next_(first_site.load()) {
  while (!first_site.compare_exchange_weak(next_, this)) {
  }
}

void CallSite::pause() const {
  if (const std::uint32_t delay = delay_microseconds.load(std::memory_order_relaxed)) {
    std::this_thread::sleep_for(std::chrono::microseconds(delay));
  }
}

CallSite* Calls::find(const char* call) {
  const std::string wanted = without_version(call);
  for (CallSite* site = first_site; site; site = site->next()) {
    if (without_version(site->name()) == wanted) return site;
  }
  return nullptr;
}

bool Calls::fail(const char* call, std::uint64_t nth, int code, std::int64_t times) {
  const bool any = !std::strcmp(call, "*");
  const CallSite* site = any ? nullptr : find(call);
  if (nth == 0 || times == 0 || (!any && !site)) return false;
  faults_.push_back({site, (any ? total_ : site->count) + nth, times, code});
  return true;
}

void Calls::fail_from(const char* commands) {
  for (const std::string& command : split(commands, ',')) {
    const std::vector<std::string> part = split(command, ':');
    if (part.size() < 3) continue;
    const std::int64_t times = part.size() > 3 ? std::strtoll(part[3].c_str(), nullptr, 0) : 1;
    fail(part[0].c_str(), std::strtoull(part[1].c_str(), nullptr, 0), std::atoi(part[2].c_str()), times);
  }
}

int Calls::injected(const CallSite& site) const {
  for (const Fault& fault : faults_) {
    if (fault.site && fault.site != &site) continue;
    const std::uint64_t count = fault.site ? site.count : total_;
    const bool begun = count >= fault.first;
    if (begun && (fault.times < 0 || count - fault.first < static_cast<std::uint64_t>(fault.times))) return fault.code;
  }
  return 0;
}

bool Calls::delay(const char* call, std::uint32_t microseconds) {
  CallSite* site = find(call);
  if (site) site->delay_microseconds.store(microseconds, std::memory_order_relaxed);
  return site != nullptr;
}

std::string Calls::text() {
  std::string lines;
  for (const CallSite* site = first_site; site; site = site->next()) {
    if (site->count) lines += std::string(site->name()) + " " + std::to_string(site->count) + "\n";
  }
  return lines;
}

void Calls::reset() {
  faults_.clear();
  total_ = 0;
  for (CallSite* site = first_site; site; site = site->next()) {
    site->count = 0;
    site->delay_microseconds.store(0, std::memory_order_relaxed);
  }
}

}  // namespace hardpoint::simulators
