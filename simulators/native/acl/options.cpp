// Options of the AscendCL runtime that frameworks set and read back, and that change nothing here.
#include <map>

#include "acl/api.hpp"

using namespace hardpoint::simulators;
using namespace hardpoint::simulators::acl;

namespace {

// Process-wide, as the API has it. Guarded by the simulator's mutex.
std::map<int, std::int64_t>& options() {
  static auto* values = new std::map<int, std::int64_t>;
  return *values;
}

int set_option(CallSite& site, int option, std::int64_t value) {
  return acl_call(site, [&](Simulator&) {
    options()[option] = value;
    return Result::Ok;
  });
}

int get_option(CallSite& site, int option, std::int64_t* value) {
  return acl_call(site, [&](Simulator&) {
    if (!value) return Result::NullArgument;
    *value = options()[option];
    return Result::Ok;
  });
}

constexpr int kContextOptions = 1000, kSaturationMode = 2000, kTimeout = 2001, kCompilerOptions = 3000;

}  // namespace

ACL_CALL(aclrtSetSysParamOpt)(int option, std::int64_t value) {
  return set_option(site_of_aclrtSetSysParamOpt, option, value);
}

ACL_CALL(aclrtGetSysParamOpt)(int option, std::int64_t* value) {
  return get_option(site_of_aclrtGetSysParamOpt, option, value);
}

ACL_CALL(aclrtCtxSetSysParamOpt)(int option, std::int64_t value) {
  return set_option(site_of_aclrtCtxSetSysParamOpt, kContextOptions + option, value);
}

ACL_CALL(aclrtCtxGetSysParamOpt)(int option, std::int64_t* value) {
  return get_option(site_of_aclrtCtxGetSysParamOpt, kContextOptions + option, value);
}

ACL_CALL(aclrtSetDeviceSatMode)(int mode) {
  return set_option(site_of_aclrtSetDeviceSatMode, kSaturationMode, mode);
}

ACL_CALL(aclrtGetDeviceSatMode)(int* mode) {
  std::int64_t value = 0;
  const int code = get_option(site_of_aclrtGetDeviceSatMode, kSaturationMode, &value);
  if (!code && mode) *mode = static_cast<int>(value);
  return code;
}

ACL_CALL(aclrtSetOpExecuteTimeOut)(std::uint32_t seconds) {
  return set_option(site_of_aclrtSetOpExecuteTimeOut, kTimeout, seconds);
}

// Of the operator compiler, whose library finds it here; nothing is ever compiled with it.
ACL_CALL(aclSetCompileopt)(int option, const char* value) {
  if (!value) return acl_call(site_of_aclSetCompileopt, [](Simulator&) { return Result::NullArgument; });
  return set_option(site_of_aclSetCompileopt, kCompilerOptions + option, 1);
}
