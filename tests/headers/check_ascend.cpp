// Our declarations of the CANN runtime against the vendor's own. Compiles, or says which differs.
#include <acl/acl.h>
#include <acl/error_codes/rt_error_codes.h>

#include "abi.hpp"
#include "api.hpp"

using namespace hardpoint::ascend;

HARDPOINT_ASCEND_FUNCTIONS(ABI_SAME_FUNCTION)
HARDPOINT_ASCEND_VALUES(ABI_SAME_VALUE)

ABI_SAME_SIZE(aclrtMemLocation, MemLocation);
ABI_SAME_FIELD(aclrtMemLocation, id, MemLocation, id);
ABI_SAME_FIELD(aclrtMemLocation, type, MemLocation, type);

ABI_SAME_SIZE(aclrtPhysicalMemProp, PhysicalMemProp);
ABI_SAME_FIELD(aclrtPhysicalMemProp, handleType, PhysicalMemProp, handle_type);
ABI_SAME_FIELD(aclrtPhysicalMemProp, allocationType, PhysicalMemProp, allocation_type);
ABI_SAME_FIELD(aclrtPhysicalMemProp, memAttr, PhysicalMemProp, mem_attr);
ABI_SAME_FIELD(aclrtPhysicalMemProp, location, PhysicalMemProp, location);
ABI_SAME_FIELD(aclrtPhysicalMemProp, reserve, PhysicalMemProp, reserve);

ABI_SAME_SIZE(aclrtMemAccessDesc, MemAccessDesc);
ABI_SAME_FIELD(aclrtMemAccessDesc, flags, MemAccessDesc, flags);
ABI_SAME_FIELD(aclrtMemAccessDesc, location, MemAccessDesc, location);
ABI_SAME_FIELD(aclrtMemAccessDesc, rsv, MemAccessDesc, rsv);

static_assert(sizeof(aclrtDrvMemHandle) == sizeof(Allocation) && sizeof(aclrtStream) == sizeof(Stream) && sizeof(aclrtContext) == sizeof(Context));

static_assert(ACL_MAJOR_VERSION == MAJOR_VERSION && ACL_MINOR_VERSION == MINOR_VERSION, "version of the headers");
