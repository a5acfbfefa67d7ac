// One step as a message, and back. The message: a row of 64-bit numbers (decodes, shape of the block table, bytes of what comes last, numbers
// in each array), the int64 arrays, the int32 arrays, and last, where there is any, what belongs to single sequences.
//
// Of the block table only what changed is sent: its writer remembers what it sent, its reader keeps a table of its own.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hardpoint::step {

inline constexpr size_t kNumLong = 5;    // token_ids, positions, seq_ids, sample_seq_ids, preempted
// slot_mapping, query_start, context_lens, rows, sample_rows, state_rows, sample_state_rows, sample_positions, swap_out, swap_in, copies
inline constexpr size_t kNumShort = 11;
inline constexpr size_t kNumArrays = kNumLong + kNumShort + 2;  // and places and values of the block table
inline constexpr size_t kNumNumbers = 4 + kNumArrays;
inline constexpr size_t kHeaderBytes = 8 * kNumNumbers;

template <class T>
struct Span {
  const T* data = nullptr;
  size_t size = 0;
};

struct Table {
  const int32_t* data = nullptr;
  int64_t rows = 0;
  int64_t columns = 0;
};

// A step's arrays, in the order in which they are written.
struct Arrays {
  int64_t num_decodes = 0;
  std::array<Span<int64_t>, kNumLong> longs;
  std::array<Span<int32_t>, kNumShort> shorts;
  Table table;

  Span<int32_t> context_lens() const { return shorts[2]; }
  Span<int32_t> rows() const { return shorts[3]; }
};

// Writes the messages of one engine's steps.
class Packer {
 public:
  // Finds what changed of the table and returns the bytes of the message, of which `last_bytes` come last. A sequence uses the blocks of
  // `block_size` tokens that its context fills. Throws std::invalid_argument for rows or contexts that the table has not.
  size_t measure(const Arrays& step, int64_t block_size, size_t last_bytes);

  // Writes the message that was measured, except for what comes last; returns where that begins.
  char* write(const Arrays& step, size_t last_bytes, char* to) const;

  // Counts the message that was measured last as sent: without it, the next one says again what this one said. Idempotent.
  void commit();

 private:
  std::vector<int32_t> sent_;
  int64_t rows_ = 0, columns_ = 0;
  // Of the message that was measured last.
  int64_t new_rows_ = 0, new_columns_ = 0;
  std::vector<int32_t> places_, values_;
};

// What a message's header says; the arrays follow it one after the other.
struct Header {
  std::array<int64_t, kNumNumbers> numbers;

  int64_t num_decodes() const { return numbers[0]; }
  int64_t rows() const { return numbers[1]; }
  int64_t columns() const { return numbers[2]; }
  int64_t last_bytes() const { return numbers[3]; }
  int64_t size_of(size_t array) const { return numbers[4 + array]; }
};

// Throws std::invalid_argument unless the numbers are a message's of `bytes` bytes.
Header read_header(const char* message, size_t bytes);

// Writes `count` changes into a table; throws std::invalid_argument, with nothing written, for a place outside of it.
void change(int32_t* table, int64_t table_size, const char* places, const char* values, int64_t count);

}  // namespace hardpoint::step
