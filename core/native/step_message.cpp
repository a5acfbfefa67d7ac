#include "step_message.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace hardpoint::step {
namespace {

constexpr int64_t kMostPlaces = std::numeric_limits<int32_t>::max();

template <class T>
char* put(const T* data, size_t size, char* to) {
  if (size != 0) std::memcpy(to, data, size * sizeof(T));
  return to + size * sizeof(T);
}

bool is_table(int64_t rows, int64_t columns) {
  return rows >= 0 && columns >= 0 && (columns == 0 || rows <= kMostPlaces / columns);
}

}  // namespace

size_t Packer::measure(const Arrays& step, int64_t block_size, size_t last_bytes) {
  const auto [table, num_rows, num_columns] = step.table;
  const Span<int32_t> rows = step.rows(), contexts = step.context_lens();
  if (!is_table(num_rows, num_columns) || rows.size != contexts.size || block_size < 1)
    throw std::invalid_argument(std::to_string(rows.size) + " rows and " + std::to_string(contexts.size) +
                                " contexts of a block table of " + std::to_string(num_rows) + " x " +
                                std::to_string(num_columns) + ", in blocks of " + std::to_string(block_size));
  places_.clear();
  values_.clear();
  // Where the table has another shape, its reader begins with one of zeros.
  const bool is_new = rows_ != num_rows || columns_ != num_columns;
  const std::vector<int32_t> zeros(is_new ? static_cast<size_t>(num_columns) : 0, 0);
  for (size_t i = 0; i < rows.size; ++i) {
    const int64_t row = rows.data[i], context = contexts.data[i];
    if (row < 0 || row >= num_rows || context < 0)
      throw std::invalid_argument("row " + std::to_string(row) + " with a context of " + std::to_string(context) +
                                  " in a block table of " + std::to_string(num_rows) + " rows");
    const int64_t used = std::min((context + block_size - 1) / block_size, num_columns), start = row * num_columns;
    const int32_t *now = table + start, *before = is_new ? zeros.data() : sent_.data() + start;
    for (const int32_t* from = now; (from = std::mismatch(from, now + used, before + (from - now)).first) != now + used; ++from) {
      places_.push_back(static_cast<int32_t>(start + (from - now)));
      values_.push_back(*from);
    }
  }
  new_rows_ = num_rows;
  new_columns_ = num_columns;
  size_t bytes = kHeaderBytes + last_bytes + 8 * places_.size();
  for (const auto& array : step.longs) bytes += 8 * array.size;
  for (const auto& array : step.shorts) bytes += 4 * array.size;
  return bytes;
}

char* Packer::write(const Arrays& step, size_t last_bytes, char* to) const {
  std::array<int64_t, kNumNumbers> numbers{step.num_decodes, new_rows_, new_columns_, static_cast<int64_t>(last_bytes)};
  size_t number = 4;
  for (const auto& array : step.longs) numbers[number++] = static_cast<int64_t>(array.size);
  for (const auto& array : step.shorts) numbers[number++] = static_cast<int64_t>(array.size);
  numbers[number++] = static_cast<int64_t>(places_.size());
  numbers[number++] = static_cast<int64_t>(values_.size());
  to = put(numbers.data(), numbers.size(), to);
  for (const auto& array : step.longs) to = put(array.data, array.size, to);
  for (const auto& array : step.shorts) to = put(array.data, array.size, to);
  to = put(places_.data(), places_.size(), to);
  to = put(values_.data(), values_.size(), to);
  return to;
}

void Packer::commit() {
  if (rows_ != new_rows_ || columns_ != new_columns_) sent_.assign(static_cast<size_t>(new_rows_ * new_columns_), 0);
  rows_ = new_rows_;
  columns_ = new_columns_;
  for (size_t i = 0; i < places_.size(); ++i) sent_[places_[i]] = values_[i];
  places_.clear();
  values_.clear();
}

Header read_header(const char* message, size_t bytes) {
  if (bytes < kHeaderBytes) throw std::invalid_argument("a message of " + std::to_string(bytes) + " bytes");
  Header header;
  std::memcpy(header.numbers.data(), message, kHeaderBytes);
  // Each number is compared with what is left, so that no sum can overflow.
  size_t left = bytes - kHeaderBytes;
  const auto take = [&](int64_t count, size_t item) {
    if (count < 0 || static_cast<uint64_t>(count) > left / item)
      throw std::invalid_argument(std::to_string(count) + " items in a message of " + std::to_string(bytes) + " bytes");
    left -= static_cast<size_t>(count) * item;
  };
  take(header.last_bytes(), 1);
  for (size_t i = 0; i < kNumArrays; ++i) take(header.size_of(i), i < kNumLong ? 8 : 4);
  const bool pairs_are_whole = ((header.size_of(kNumArrays - 5) | header.size_of(kNumArrays - 4) | header.size_of(kNumArrays - 3)) & 1) == 0;
  if (left != 0 || header.num_decodes() < 0 || !is_table(header.rows(), header.columns()) || !pairs_are_whole ||
      header.size_of(kNumArrays - 2) != header.size_of(kNumArrays - 1))
    throw std::invalid_argument("the numbers of a message of " + std::to_string(bytes) + " bytes do not fit together");
  return header;
}

void change(int32_t* table, int64_t table_size, const char* places, const char* values, int64_t count) {
  const auto number = [](const char* from, int64_t i) {
    int32_t value;
    std::memcpy(&value, from + 4 * i, 4);  // A message may begin at any address.
    return value;
  };
  for (int64_t i = 0; i < count; ++i) {
    const int32_t place = number(places, i);
    if (place < 0 || place >= table_size)
      throw std::invalid_argument("place " + std::to_string(place) + " of a block table of " + std::to_string(table_size));
  }
  for (int64_t i = 0; i < count; ++i) table[number(places, i)] = number(values, i);
}

}  // namespace hardpoint::step
