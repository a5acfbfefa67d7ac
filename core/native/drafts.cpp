#include "drafts.hpp"

#include <algorithm>

namespace hardpoint::scheduler {
namespace {

constexpr double kOwnMemory = 0.9;
constexpr double kCommonMemory = 0.995;
// What is known of all sequences counts as so many tokens of a sequence's own.
constexpr double kPriorWeight = 2.0;
// A draft must be worth this much more than its rows: neither the cost nor the rate is known well, and a token that comes early saves a
// step only where no other sequence needs it.
constexpr double kMargin = 1.5;
// A model that was found not to be worth its time is asked again after so many tokens: the text may have changed.
constexpr int32_t kTriedAgain = 32;
constexpr int32_t kNotGuessedYet = -1;

}  // namespace

Trust initial_trust() { return {Acceptance{2, 4}, Acceptance{2, 4}, Acceptance{2.5, 4}, Acceptance{3, 4}}; }

Drafter::Drafter(const DraftConfig& config)
    : config_(config),
      lookup_(config.lookup_min, config.lookup_max),
      own_{Acceptance{0, 0}, Acceptance{0, 0}, Acceptance{0, 0}, Acceptance{0, 0}} {}

const std::vector<int32_t>& Drafter::propose(const int32_t* tokens, int32_t count) {
  if (made_for_ == count) return proposal_;
  made_for_ = count;
  proposal_.clear();
  if (config_.by_model) {
    proposal_.assign(static_cast<size_t>(config_.num_tokens), kNotGuessedYet);
    ++num_unguessed_;
    return proposal_;
  }
  const PromptLookup::Match match = lookup_.find(tokens, count);
  if (match.length == 0) return proposal_;
  trust_ = std::min<size_t>(match.length - config_.lookup_min, kNumTrusts - 1);
  // Where the match ends close to the end of the text, the text goes on as it has repeated itself.
  const int32_t period = count - match.end;
  for (int32_t i = 0; i < config_.num_tokens; ++i) {
    const int32_t token = tokens[match.end + i % period];
    if (config_.vocab_size > 0 && token >= config_.vocab_size) break;
    proposal_.push_back(token);
  }
  return proposal_;
}

int32_t Drafter::worth(const StepCost& cost, int32_t num_rows, const Trust& common) const {
  const double rate = own_[trust_].rate(common[trust_].rate(), kPriorWeight);
  // A row costs its time; it is worth what the step would take for the tokens that it brings.
  const double rows = std::max(num_rows, 1);
  const double seconds = cost.fixed + rows * cost.per_token;
  const double needed = seconds > 0 ? kMargin * rows * cost.per_token / seconds : 0;
  int32_t count = 0;
  double chance = rate;
  while (count < static_cast<int32_t>(proposal_.size()) && chance > needed) {
    ++count;
    chance *= rate;
  }
  return count == 0 && num_unguessed_ > kTriedAgain ? 1 : count;
}

void Drafter::guessed(const int64_t* tokens, int32_t count) {
  proposal_.assign(tokens, tokens + count);
  num_unguessed_ = 0;
}

void Drafter::note(int32_t count, int32_t token, Trust& common) {
  const int32_t place = count - made_for_;
  if (made_for_ < 0 || place < 0 || static_cast<size_t>(place) >= proposal_.size()) return;
  if (proposal_[place] == kNotGuessedYet) return;
  const bool is_right = proposal_[place] == token;
  own_[trust_].note(is_right, kOwnMemory);
  common[trust_].note(is_right, kCommonMemory);
}

}  // namespace hardpoint::scheduler
