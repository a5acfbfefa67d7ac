// Token ids from Python: lists and other sequences of int, and numpy arrays of int32 or int64.
#pragma once
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace hardpoint {

// A token id that is negative or not below the limit; surfaces in Python as IndexError.
struct TokenRangeError {
  int64_t token;
  int64_t position;
};

// `limit`: one more than the largest legal id; `spare`: further tokens to have memory for. Anything that is not an integer
// raises TypeError.
std::vector<int32_t> token_ids_from(pybind11::handle source, int64_t limit, int64_t spare = 0);

}  // namespace hardpoint
