"""FlashInfer's wrappers of paged attention in plain torch on the host: simulated, for tests of the calls.

They compute what the documentation of FlashInfer 0.7.2 says, keep what its graphs keep, and reject what its Python and C++ reject. What the
adapter has no use for is not there. This shows that calls are right, not that FlashInfer's kernels are. `HARDPOINT_TEST_FLASHINFER` makes
it slow, wrong or broken.
"""

from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

__all__ = ["BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"]
