// Prompt lookup: what followed the last tokens of a sequence where they stood before is a guess at what follows them next.
// (Saxena, Prompt Lookup Decoding, 2023.)
//
// Every token is entered once. Positions whose last `min_length` tokens have the same hash form a chain, newest first, as in LZ77; a search
// walks a bounded part of one chain, so that it costs the same however long the sequence is.
#pragma once
#include <cstdint>
#include <vector>

namespace hardpoint::scheduler {

class PromptLookup {
 public:
  // An end and the tokens before it that are those at the end of the sequence; a length of 0 where there is none.
  struct Match {
    int32_t end = 0;
    int32_t length = 0;
  };

  PromptLookup(int32_t min_length, int32_t max_length) : min_length_(min_length), max_length_(max_length) {}

  // The longest match of the last tokens, of at least `min_length` and at most `max_length`; of those as long, the newest. Tokens that were
  // given before are the same now, with more after them.
  Match find(const int32_t* tokens, int32_t count);

 private:
  uint32_t hash(const int32_t* end) const;
  void enter(const int32_t* tokens, int32_t end);
  void reserve(const int32_t* tokens, int32_t count);

  int32_t min_length_, max_length_;
  int32_t num_entered_ = 0;        // ends up to this one are in the chains
  std::vector<int32_t> newest_;    // by hash: the newest end, 0 for none
  std::vector<int32_t> previous_;  // by end: the one before it in its chain
};

}  // namespace hardpoint::scheduler
