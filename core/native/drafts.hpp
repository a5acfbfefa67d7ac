// Draft tokens: guesses at a sequence's next tokens, which one step verifies all at once, and how many of them are worth their rows.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "prompt_lookup.hpp"

namespace hardpoint::scheduler {

struct DraftConfig {
  int32_t num_tokens = 0;             // most drafts of a sequence in a step; 0: none are made
  int32_t num_slots = 0;              // most drafts of a step
  bool by_model = false;              // the worker's draft model makes them while it computes the step; otherwise they are looked up
  int32_t lookup_min = 0;             // tokens that a match has
  int32_t lookup_max = 0;
  int32_t vocab_size = 0;             // a draft is below; 0: no limit
};

// What a step takes, in seconds; both 0 while they are not known, and drafts then cost nothing.
struct StepCost {
  double fixed = 0, per_token = 0;
};

struct DraftStats {
  int64_t num_drafts = 0;  // of sequences in steps
  int64_t num_draft_tokens = 0, num_accepted_tokens = 0;
  std::vector<int64_t> accepted_at;  // by place in the draft
};

// How often a drafted token was the one that came; older tokens count less.
class Acceptance {
 public:
  Acceptance(double accepted, double tried) : accepted_(accepted), tried_(tried) {}
  void note(bool was_accepted, double memory) {
    accepted_ = memory * accepted_ + (was_accepted ? 1.0 : 0.0);
    tried_ = memory * tried_ + 1.0;
  }
  double rate() const { return accepted_ / tried_; }
  // The rate, of which `prior` counts as so many tokens.
  double rate(double prior, double weight) const { return (accepted_ + weight * prior) / (tried_ + weight); }

 private:
  double accepted_, tried_;
};

// Matches of like lengths are trusted alike: by how much they are longer than the shortest.
inline constexpr size_t kNumTrusts = 4;
using Trust = std::array<Acceptance, kNumTrusts>;

// Of all sequences together: what a sequence starts with.
Trust initial_trust();

// The drafts of one sequence.
class Drafter {
 public:
  explicit Drafter(const DraftConfig& config);

  // Guesses at what follows `count` tokens, -1 for those that a model will make. Made once for a number of tokens.
  const std::vector<int32_t>& propose(const int32_t* tokens, int32_t count);

  // How many of the proposal's tokens are worth their rows in a step of `num_rows` others; `common` is that of all sequences.
  int32_t worth(const StepCost& cost, int32_t num_rows, const Trust& common) const;

  // What a model has guessed in the step that is booked.
  void guessed(const int64_t* tokens, int32_t count);

  // The token after `count` others, which a step has sampled: what was proposed for its place is right or wrong, whether it was computed
  // or not.
  void note(int32_t count, int32_t token, Trust& common);

 private:
  DraftConfig config_;
  PromptLookup lookup_;
  Trust own_;
  int32_t made_for_ = -1;
  int32_t num_unguessed_ = 0;  // proposals since a model has guessed
  size_t trust_ = 0;
  std::vector<int32_t> proposal_;
};

}  // namespace hardpoint::scheduler
