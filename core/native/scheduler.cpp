#include "scheduler.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace hardpoint::scheduler {
namespace {

constexpr int32_t kNever = std::numeric_limits<int32_t>::max();
// Looking up a long prompt at every step while it does not fit would be the most expensive part of the step. It is tried again
// when blocks became free, and now and then because others may have computed its prefix.
constexpr int32_t kStepsBetweenTrials = 16;

// Sequences between one that ends a block and one for which what that touches in the prefix cache is brought near.
constexpr int32_t kRegistrationDistance = 8;

constexpr uint32_t filter_bit(int32_t token) { return uint32_t{1} << (static_cast<uint32_t>(token) % 32); }

}  // namespace

Plan::Plan(size_t max_tokens, size_t max_seqs, size_t max_samples, size_t num_groups)
    : token_ids(max_tokens),
      positions(max_tokens),
      seq_ids(max_seqs),
      sample_seq_ids(max_samples),
      slot_mapping(num_groups * max_tokens),
      query_start(max_seqs + 1),
      context_lens(max_seqs),
      rows(max_seqs),
      state_rows(max_seqs),
      sample_rows(max_samples),
      sample_state_rows(max_samples),
      sample_positions(max_samples),
      sample_tokens(max_samples),
      sequences(max_seqs) {}

Scheduler::Scheduler(const SchedulerConfig& config)
    : config_(config), blocks_(config.blocks), num_free_rows_(config.max_num_seqs) {
  const auto max_seqs = static_cast<size_t>(config.max_num_seqs);
  max_blocks_per_seq = blocks_.blocks_for(config.max_model_len);
  const auto num_groups = static_cast<size_t>(blocks_.num_groups());
  block_table = Array<BlockId>(num_groups * max_seqs * max_blocks_per_seq);
  for (int32_t i = 0; i <= config.steps_in_flight; ++i)
    plans_.emplace_back(static_cast<size_t>(config.max_num_batched_tokens), max_seqs, static_cast<size_t>(max_samples()), num_groups);
  draft_stats_.accepted_at.resize(static_cast<size_t>(config.drafts.num_tokens));
  running_.reserve(max_seqs);
  for (int32_t row = config.max_num_seqs - 1; row >= 0; --row) free_rows_.push_back(row);
}

// Requests

Sequence* Scheduler::find_unfinished(int64_t id) const {
  const auto it = by_id_.find(id);
  return it == by_id_.end() || it->second->state == SequenceState::finished ? nullptr : it->second;
}

Sequence* Scheduler::new_sequence() {
  if (free_sequences_.empty()) {
    slab_.emplace_back();
    return &slab_.back();
  }
  Sequence* sequence = free_sequences_.back();
  free_sequences_.pop_back();
  return sequence;
}

void Scheduler::set_stop_ids(Sequence& sequence, const std::vector<int32_t>& ids) {
  sequence.many_stop_ids = ids.size() > std::size(sequence.stop_ids);
  for (const int32_t id : ids) sequence.stop_filter |= filter_bit(id);
  if (sequence.many_stop_ids) {
    sequence.more_stop_ids = ids;
    std::sort(sequence.more_stop_ids.begin(), sequence.more_stop_ids.end());
  } else {
    std::copy(ids.begin(), ids.end(), sequence.stop_ids);
  }
}

void Scheduler::reserve_tokens(Sequence& sequence, int64_t capacity) {
  sequence.storage.resize(capacity);
  sequence.tokens = sequence.storage.data();
  sequence.room_until = static_cast<int32_t>(std::min<int64_t>(capacity, sequence.max_total));
}

int64_t Scheduler::add_request(Request request) {
  const int64_t handle = next_id_;
  next_id_ += request.n;
  const auto prompt_len = static_cast<int64_t>(request.prompt.size());
  // A sequence ends where neither the context nor the whole pool could hold one more token.
  const int64_t limit = std::min<int64_t>(config_.max_model_len, pool_slots());
  const int64_t max_total = request.pooling ? prompt_len : std::min(prompt_len + request.max_tokens, limit);
  for (int32_t i = 0; i < request.n; ++i) {
    Sequence* sequence = new_sequence();
    sequence->id = handle + i;
    sequence->handle = handle;
    sequence->prompt_len = static_cast<int32_t>(prompt_len);
    sequence->max_total = static_cast<int32_t>(max_total);
    sequence->min_total = static_cast<int32_t>(std::min<int64_t>(prompt_len + request.min_tokens, kNever));
    sequence->priority = config_.policy == Policy::priority ? request.priority : 0;
    sequence->arrival = request.arrival;
    sequence->max_cached_tokens = request.max_cached_tokens;
    sequence->pooling = request.pooling;
    sequence->plan_ahead = sequence->runs_ahead = request.plan_ahead && !request.beams;
    sequence->is_beam = request.beams;
    sequence->has_drafter = request.drafts && config_.drafts.num_tokens > 0;
    if (sequence->has_drafter) sequence->drafter = std::make_unique<Drafter>(config_.drafts);
    sequence->state = SequenceState::dormant;
    set_stop_ids(*sequence, request.stop_token_ids);
    sequence->table.root = blocks_.names().acquire_root(request.salt);
    by_id_.emplace(sequence->id, sequence);
  }
  if (request.n > 1) forks_of_.emplace(handle, Forks{request.n, request.n});
  Sequence& first = *by_id_.at(handle);
  first.pending_forks = request.n - 1;
  first.runs_ahead = first.plan_ahead && first.pending_forks == 0;
  first.storage = std::move(request.prompt);
  first.num_tokens = first.prompt_len;
  reserve_tokens(first, prompt_len + std::min(max_total - prompt_len, kReservedOutput));
  enqueue(first);
  return handle;
}

void Scheduler::enqueue(Sequence& sequence) {
  sequence.state = SequenceState::waiting;
  waiting_.insert(&sequence);
  if (config_.policy == Policy::priority) waiting_by_arrival_.insert(&sequence);
}

void Scheduler::dequeue(Sequence& sequence) {
  waiting_.erase(&sequence);
  if (config_.policy == Policy::priority) waiting_by_arrival_.erase(&sequence);
  if (blocked_ == &sequence) blocked_ = nullptr;
}

// Planning a step

const Plan* Scheduler::schedule() {
  if (static_cast<size_t>(num_in_flight_) == plans_.size())
    throw std::logic_error(std::to_string(num_in_flight_) + " steps have had neither update() nor fail_step()");
  Plan& plan = begin_plan();
  budget_ = config_.max_num_batched_tokens;
  may_admit_ = true;
  has_prefills_ = has_decodes_ = false;
  planned_.clear();
  drafted_.clear();

  schedule_decodes();
  budget_ -= plan.counts.num_seqs;
  for (const Chunk& drafted : drafted_) budget_ -= 1 + drafted.length;
  // A long step is a long gap between two tokens of each sequence that decodes.
  if (has_decodes_) budget_ = std::min(budget_, config_.mixed_prefill_tokens);
  if (has_prefills_) schedule_prefills();
  if (may_admit_ && !swapped_.empty()) schedule_swapped();
  if (may_admit_ && swapped_.empty() && !waiting_.empty()) schedule_waiting();

  complete_decodes();
  for (const Chunk& drafted : drafted_) emit_drafted(*drafted.sequence, drafted.length);
  for (const Chunk& chunk : planned_) emit_chunk(*chunk.sequence, chunk.length);
  plan.query_start[plan.counts.num_seqs] = plan.counts.num_tokens;
  // Where all others wait for their tokens, a sequence may be swapped out in a step that computes nothing.
  if (plan.counts.num_seqs == 0 && swap_out.empty() && !blocks_.tiers().has_moves()) return nullptr;
  row_copies.swap(next_row_copies_);
  return end_plan();
}

Plan& Scheduler::begin_plan() {
  Plan& plan = plans_[(oldest_ + num_in_flight_) % plans_.size()];
  plan_ = &plan;
  plan.counts = StepCounts{};
  plan.swapped_out.clear();
  plan.loads.clear();
  swap_out.clear();
  swap_in.clear();
  copies.clear();
  row_copies.clear();
  preempted.clear();
  blocks_.tiers().begin_plan();
  return plan;
}

const Plan* Scheduler::end_plan() {
  kv::PrefixTiers& tiers = blocks_.tiers();
  Plan& plan = *plan_;
  plan.tier_loads = tiers.loads;
  plan.tier_stores = tiers.demotions;
  plan.tier_stores.insert(plan.tier_stores.end(), tiers.stores.begin(), tiers.stores.end());
  tiers.end_plan();
  ++num_in_flight_;
  return &plan;
}

const Plan* Scheduler::store_cached() {
  if (num_in_flight_ > 0)
    throw std::logic_error(std::to_string(num_in_flight_) + " steps have had neither update() nor fail_step()");
  if (!blocks_.tiers().is_on()) return nullptr;
  begin_plan().query_start[0] = 0;
  std::vector<const kv::BlockTable*> tables;
  for (const Sequence* sequence : running_) tables.push_back(&sequence->table);
  blocks_.store_cached(tables);
  return blocks_.tiers().has_moves() ? end_plan() : nullptr;
}

void Scheduler::drop_stored(const std::vector<std::pair<int32_t, int64_t>>& lost) {
  for (const auto& [slot, tag] : lost) blocks_.tiers().drop(slot, tag);
}

void Scheduler::schedule_decodes() {
  int32_t row = 0;
  draft_slots_ = std::min(config_.drafts.num_slots, config_.max_num_batched_tokens - static_cast<int32_t>(running_.size()));
  // Preemption shortens running_ from its end, which this loop has not reached yet.
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence& sequence = *running_[i];
    if (!sequence.decoding) {
      has_prefills_ = true;
      continue;
    }
    if (sequence.waits_for_token() || (sequence.has_drafter && sequence.in_flight != 0 && awaits_drafts(sequence))) {
      has_decodes_ = true;
      continue;
    }
    if (sequence.num_computed >= sequence.bookkeeping_at) {
      const Readiness readiness = sequence.is_beam ? prepare_beams(i) : prepare_decode(sequence);
      if (readiness == Readiness::preempted) break;
      if (readiness == Readiness::complete) continue;
    }
    const int32_t num_drafts = sequence.has_drafter ? plan_drafts(sequence) : 0;
    if (num_drafts > 0) {
      drafted_.push_back({&sequence, num_drafts});
      draft_slots_ -= num_drafts;
    } else {
      emit_decode(sequence, row++);
    }
  }
  plan_->counts.num_seqs = row;
  has_decodes_ |= row > 0 || !drafted_.empty();
}

// How many guesses at a sequence's next tokens this step computes, in slots that it has.
int32_t Scheduler::plan_drafts(Sequence& sequence) {
  const int32_t position = sequence.num_computed;
  if (position + 1 != sequence.num_tokens) return 0;  // its last token is in flight
  Drafter& drafter = *sequence.drafter;
  drafter.propose(sequence.tokens, sequence.num_tokens);
  const int32_t room = std::min({draft_slots_, sequence.max_total - sequence.num_tokens - 1,
                                 sequence.table.num_blocks * config_.blocks.block_size - position - 1});
  return std::max(0, std::min(room, drafter.worth(step_cost_, static_cast<int32_t>(running_.size()), trust_)));
}

// Whether the token in flight is better waited for: with what is known before it, more than that one can be guessed.
bool Scheduler::awaits_drafts(Sequence& sequence) {
  sequence.drafter->propose(sequence.tokens, sequence.num_tokens);
  return sequence.drafter->worth(step_cost_, static_cast<int32_t>(running_.size()), trust_) > 1;
}

Scheduler::Readiness Scheduler::prepare_decode(Sequence& sequence) {
  const int64_t position = sequence.num_computed;
  if (position + 1 >= sequence.max_total) return Readiness::complete;  // its last token is in flight
  const int32_t total = blocks_.blocks_for(slots_wanted(position + 1));
  while (blocks_.growth(sequence.table, position, total) > blocks_.num_free_device()) {
    Sequence& victim = *running_.back();
    preempt(victim);
    if (&victim == &sequence) return Readiness::preempted;
  }
  blocks_.grow(sequence.table, position, total, copies);
  locate(sequence, position);
  return Readiness::ready;
}

// Makes room for the next token of a beam and of those after it, before any of them is planned. They are neighbours in running_.
Scheduler::Readiness Scheduler::prepare_beams(size_t first) {
  const int64_t handle = running_[first]->handle;
  while (true) {
    int64_t needed = 0;
    std::set<BlockId> tails;
    for (size_t i = first; i < running_.size() && running_[i]->handle == handle; ++i) {
      const Sequence& beam = *running_[i];
      // One that is sampled, or computed again, has what it needs for now.
      if (!beam.decoding || beam.waits_for_token()) continue;
      const int64_t position = beam.num_computed;
      const int32_t growth = blocks_.growth(beam.table, position, blocks_.blocks_for(slots_wanted(position + 1)));
      // Of those that share a block the last one keeps it.
      const bool keeps = blocks_.shares_block(beam.table, position) &&
                         tails.insert(beam.table.blocks[position / config_.blocks.block_size]).second;
      needed += growth - (keeps ? blocks_.num_groups() : 0);
    }
    if (needed <= blocks_.num_free_device()) break;
    const bool is_own = running_.back()->handle == handle;
    preempt(*running_.back());
    if (is_own) return Readiness::preempted;
  }
  return prepare_decode(*running_[first]);
}

int64_t Scheduler::slots_wanted(int64_t num_tokens) const {
  const int64_t limit = std::min<int64_t>(config_.max_model_len, pool_slots());
  return std::max(num_tokens, std::min(num_tokens + config_.num_lookahead_slots, limit));
}

void Scheduler::locate(Sequence& sequence, int64_t position) {
  const int32_t size = config_.blocks.block_size;
  const auto index = static_cast<int32_t>(position / size);
  sequence.slot_offset = (sequence.table.blocks[index] - index) * size;
  for (int32_t group = 1; group < blocks_.num_groups(); ++group)
    sequence.group_offsets[group] = (sequence.table.blocks[group * sequence.table.group_stride + index] - index) * size;
  sequence.bookkeeping_at = std::min({(index + 1) * size, sequence.table.num_blocks * size - config_.num_lookahead_slots,
                                      sequence.max_total - 1});
}

void Scheduler::emit_decode(Sequence& sequence, int32_t row) {
  Plan& plan = *plan_;
  const int32_t position = sequence.num_computed++;
  plan.token_ids[row] = position < sequence.num_tokens ? sequence.tokens[position] : -1;
  plan.positions[row] = position;
  plan.slot_mapping[row] = position + sequence.slot_offset;
  for (int32_t group = 1; group < blocks_.num_groups(); ++group)
    plan.slot_mapping[group * static_cast<size_t>(config_.max_num_batched_tokens) + row] = position + sequence.group_offsets[group];
  plan.rows[row] = sequence.row;
  plan.state_rows[row] = sequence.state_row;
  plan.sample_positions[row] = position + 1 - sequence.prompt_len;
  plan.seq_ids[row] = sequence.id;
  plan.sequences[row] = &sequence;
  ++sequence.in_flight;
}

// What follows from the rows that emit_decode() wrote: each has one token and one sample.
void Scheduler::complete_decodes() {
  Plan& plan = *plan_;
  StepCounts& counts = plan.counts;
  const int32_t count = counts.num_seqs;
  counts.num_decodes = counts.num_tokens = counts.num_samples = count;
  for (int32_t row = 0; row < count; ++row) plan.query_start[row] = row;
  for (int32_t row = 0; row < count; ++row) plan.sample_rows[row] = row;
  for (int32_t row = 0; row < count; ++row) plan.context_lens[row] = static_cast<int32_t>(plan.positions[row]) + 1;
  std::copy_n(plan.state_rows.data(), count, plan.sample_state_rows.data());
  std::copy_n(plan.seq_ids.data(), count, plan.sample_seq_ids.data());
  for (int32_t row = 0; row < count; ++row) plan.sample_tokens[row] = row;
}

int32_t Scheduler::chunk_of(const Sequence& sequence) const {
  int32_t length = std::min(sequence.remaining(), budget_);
  if (config_.long_prefill_token_threshold > 0) length = std::min(length, config_.long_prefill_token_threshold);
  return length;
}

int32_t Scheduler::planned_tokens() const {
  int32_t tokens = 0;
  for (const Chunk& chunk : planned_) tokens += chunk.length;
  return tokens;
}

void Scheduler::schedule_prefills() {
  for (Sequence* sequence : running_) {
    if (budget_ == 0) return;
    if (sequence->decoding || sequence->is_loading) continue;
    const int32_t length = chunk_of(*sequence);
    if (length == 0) continue;  // the end of a pooled prompt is in flight
    if (!config_.enable_chunked_prefill && length < sequence->remaining()) {
      // It fits once enough of the decodes have ended: others would take their places.
      may_admit_ = false;
      continue;
    }
    planned_.push_back({sequence, length});
    budget_ -= length;
  }
}

void Scheduler::schedule_swapped() {
  while (!swapped_.empty() && budget_ > 0) {
    Sequence& sequence = **swapped_.begin();
    if (sequence.in_flight > 0) return;
    if (num_free_rows_ < 1 + sequence.pending_forks) return;
    if (!config_.enable_chunked_prefill && sequence.remaining() > budget_) return;
    // Prompts that nobody had to decode beside may have been planned by now.
    const int32_t room = config_.mixed_prefill_tokens - planned_tokens();
    if (sequence.decoding && room < 0) return;
    const int32_t total = blocks_.blocks_for(slots_wanted(sequence.num_tokens));
    if (blocks_.can_take(blocks_.held_blocks(sequence.table, total)) != AllocStatus::ok) return;
    swapped_.erase(swapped_.begin());
    alloc_row(sequence);
    blocks_.swap_in(sequence.table, sequence.host_blocks, total, swap_in);
    sequence.register_at = config_.blocks.block_size;
    start_running(sequence);
    if (sequence.decoding) {
      locate(sequence, sequence.num_computed);
      emit_decode(sequence, plan_->counts.num_seqs++);
      budget_ = std::min(budget_ - 1, room);
    } else {
      const int32_t length = chunk_of(sequence);
      planned_.push_back({&sequence, length});
      budget_ -= length;
    }
  }
}

void Scheduler::schedule_waiting() {
  while (!waiting_.empty() && budget_ > 0) {
    Sequence& sequence = **waiting_.begin();
    if (sequence.in_flight > 0) return;
    if (num_free_rows_ < 1 + sequence.pending_forks) return;
    if (&sequence == blocked_ && blocks_.num_free_device() <= blocked_free_ && ++blocked_steps_ < kStepsBetweenTrials) return;
    const bool are_beams = sequence.is_beam && sequence.pending_forks == 0;
    if (are_beams && !reserve_blocks_for_beams(sequence)) return;
    if (admit(sequence, are_beams) != AllocStatus::ok) return;
    dequeue(sequence);
    note_passed_over(sequence);
    start_running(sequence);
    if (sequence.is_loading) continue;
    const int32_t length = chunk_of(sequence);
    planned_.push_back({&sequence, length});
    budget_ -= length;
    if (are_beams) admit_beams(sequence);
  }
}

// Whether all sequences of a beam search, of which the first is at the head of the queue, can be admitted at once.
bool Scheduler::reserve_blocks_for_beams(const Sequence& first) {
  // The others wait for a step that has room for them.
  if (!config_.enable_chunked_prefill && first.num_tokens > budget_) return false;
  const std::vector<Sequence*> beams = beams_of(first.handle);
  int64_t needed = 0;
  for (const Sequence* beam : beams) {
    if (beam->in_flight > 0) return false;
    needed += static_cast<int64_t>(blocks_.num_groups()) * blocks_.blocks_for(slots_wanted(beam->num_tokens));
  }
  return num_free_rows_ >= static_cast<int32_t>(beams.size()) && blocks_.can_take(needed) == AllocStatus::ok;
}

// The first one was admitted; the others take their blocks now, and are computed as the budget allows.
void Scheduler::admit_beams(const Sequence& first) {
  for (Sequence* beam : beams_of(first.handle)) {
    if (beam == &first) continue;
    dequeue(*beam);
    admit(*beam, true);
    start_running(*beam);
    const int32_t length = chunk_of(*beam);
    if (length == 0 || (!config_.enable_chunked_prefill && length < beam->remaining())) continue;
    planned_.push_back({beam, length});
    budget_ -= length;
  }
}

// Blocks for all known tokens are taken at admission, so a prefill that has begun does not wait for blocks midway. `is_reserved`: there
// are enough.
AllocStatus Scheduler::admit(Sequence& sequence, bool is_reserved) {
  const int32_t total = blocks_.blocks_for(slots_wanted(sequence.num_tokens));
  // A preempted beam whose search has not gone on meanwhile is sampled again: not at its preemption, when a sample can be in flight.
  sequence.is_sampled = false;
  alloc_row(sequence);
  blocks_.open(sequence.table, sequence.table.root);
  kv::PrefixMatch match;
  match.parent = sequence.table.parent;
  found_.clear();
  if (sequence.max_cached_tokens > 0) {
    const int64_t shareable = std::min<int64_t>(sequence.num_tokens - 1, sequence.max_cached_tokens);
    match = blocks_.match_prefix(sequence.table, sequence.tokens, shareable + 1);
    // Beams that are admitted together are planned together.
    if (blocks_.tiers().is_on() && !is_reserved)
      blocks_.match_tiers(sequence.table, match, sequence.tokens, shareable + 1, found_);
  }
  const int32_t num_cached = match.num_blocks * config_.blocks.block_size;
  const auto num_found = static_cast<int32_t>(found_.size()) * config_.blocks.block_size;
  const AllocStatus status = blocks_.can_allocate(match, total);
  const bool fits_budget = config_.enable_chunked_prefill || sequence.num_tokens - num_cached - num_found <= budget_;
  if (!is_reserved && (status != AllocStatus::ok || !fits_budget)) {
    if (status != AllocStatus::ok) {
      blocked_ = &sequence;
      blocked_free_ = blocks_.num_free_device();
      blocked_steps_ = 0;
    }
    free_row(sequence);
    return AllocStatus::later;
  }
  // Before anything is evicted, which may go where they are.
  for (const kv::TierSlot slot : found_) blocks_.tiers().hold(slot);
  blocks_.allocate(sequence.table, match, total);
  const bool is_first = sequence.num_cached < 0;
  // What a preempted sequence finds again, it computed itself.
  if (is_first && config_.blocks.enable_prefix_caching && sequence.max_cached_tokens > 0)
    blocks_.count_lookup(sequence.num_tokens, match);
  if (is_first) sequence.num_cached = num_cached;
  sequence.num_computed = num_cached;
  sequence.register_at = num_cached + config_.blocks.block_size;
  sequence.bookkeeping_at = 0;
  if (blocks_.tiers().is_on() && sequence.max_cached_tokens > 0) {
    const int64_t shareable = std::min<int64_t>(sequence.num_tokens - 1, sequence.max_cached_tokens);
    blocks_.tiers().count_lookup(shareable / config_.blocks.block_size - match.num_blocks, found_);
  }
  if (!found_.empty()) load_from_tiers(sequence, is_first);
  return AllocStatus::ok;
}

// The blocks that follow those it shares are loaded from where they were found.
void Scheduler::load_from_tiers(Sequence& sequence, bool is_first) {
  int32_t index = sequence.num_computed / config_.blocks.block_size;
  for (const kv::TierSlot slot : found_) blocks_.tiers().load(slot, sequence.table.blocks[index++]);
  plan_->loads.push_back({&sequence, sequence.id, is_first, found_});
  sequence.is_loading = true;
  ++sequence.in_flight;
}

// Writes a row of the sequence's next tokens, of which those that it has are known; returns the row.
int32_t Scheduler::emit_tokens(Sequence& sequence, int32_t length) {
  Plan& plan = *plan_;
  const int32_t size = config_.blocks.block_size;
  const int32_t first = sequence.num_computed, last = first + length;
  const int32_t row = plan.counts.num_seqs++;
  const int32_t* tokens = sequence.tokens + first;
  int64_t* ids = plan.token_ids.data() + plan.counts.num_tokens;
  int64_t* at = plan.positions.data() + plan.counts.num_tokens;
  const int32_t num_known = std::min(length, sequence.remaining());
  for (int32_t i = 0; i < num_known; ++i) ids[i] = static_cast<uint32_t>(tokens[i]);
  for (int32_t i = 0; i < length; ++i) at[i] = static_cast<uint32_t>(first + i);
  for (int32_t group = 0; group < blocks_.num_groups(); ++group) {
    const BlockId* blocks = sequence.table.blocks + group * sequence.table.group_stride;
    int32_t* slots = plan.slot_mapping.data() + group * static_cast<size_t>(config_.max_num_batched_tokens) + plan.counts.num_tokens;
    for (int32_t position = first; position < last;) {
      const int32_t index = position / size;
      const int32_t offset = (blocks[index] - index) * size;
      const int32_t block_end = std::min((index + 1) * size, last);
      for (; position < block_end; ++position) slots[position - first] = position + offset;
    }
  }
  plan.query_start[row] = plan.counts.num_tokens;
  plan.context_lens[row] = last;
  plan.rows[row] = sequence.row;
  plan.seq_ids[row] = sequence.id;
  plan.sequences[row] = &sequence;
  plan.counts.num_tokens += length;
  sequence.num_computed = last;
  ++sequence.in_flight;
  return row;
}

// `token`: of the step; its logits are sampled for the token at `position` of the sequence.
void Scheduler::emit_sample(const Sequence& sequence, int32_t row, int32_t token, int32_t position) {
  Plan& plan = *plan_;
  const int32_t sample = plan.counts.num_samples++;
  plan.sample_rows[sample] = row;
  plan.sample_tokens[sample] = token;
  plan.sample_state_rows[sample] = sequence.state_row;
  plan.sample_positions[sample] = position - sequence.prompt_len;
  plan.sample_seq_ids[sample] = sequence.id;
}

void Scheduler::emit_chunk(Sequence& sequence, int32_t length) {
  Plan& plan = *plan_;
  const int32_t row = emit_tokens(sequence, length);
  const int32_t last = sequence.num_computed;
  if (last == sequence.num_tokens && !sequence.pooling) {
    sequence.decoding = true;
    for (int32_t i = 0; i <= sequence.pending_forks; ++i) {
      Sequence* sampled = i == 0 ? &sequence : find_unfinished(sequence.id + i);
      if (sampled == nullptr) continue;
      if (sampled->state_row < 0) take_state_row(*sampled);
      emit_sample(*sampled, row, plan.counts.num_tokens - 1, last);
    }
  }
  plan.state_rows[row] = sequence.state_row;
}

// The last token and the drafts that follow it.
void Scheduler::emit_drafted(Sequence& sequence, int32_t num_drafts) {
  Plan& plan = *plan_;
  const int32_t first = plan.counts.num_tokens, position = sequence.num_computed;
  const std::vector<int32_t>& drafts = sequence.drafter->propose(sequence.tokens, sequence.num_tokens);
  const int32_t row = emit_tokens(sequence, 1 + num_drafts);
  for (int32_t i = 0; i < num_drafts; ++i) plan.token_ids[first + 1 + i] = drafts[i];
  for (int32_t i = 0; i <= num_drafts; ++i) emit_sample(sequence, row, first + i, position + 1 + i);
  plan.state_rows[row] = sequence.state_row;
  ++plan.counts.num_drafted;
  sequence.runs_ahead = false;
  ++draft_stats_.num_drafts;
  draft_stats_.num_draft_tokens += num_drafts;
}

void Scheduler::note_passed_over(const Sequence& admitted) {
  if (config_.policy != Policy::priority) return;
  std::vector<Sequence*> to_boost;
  for (Sequence* waiting : waiting_by_arrival_) {
    if (std::tie(waiting->arrival, waiting->id) > std::tie(admitted.arrival, admitted.id)) break;
    if (++waiting->num_passed_over >= config_.starvation_limit && !waiting->boosted) to_boost.push_back(waiting);
  }
  for (Sequence* sequence : to_boost) {
    waiting_.erase(sequence);
    sequence->boosted = true;
    waiting_.insert(sequence);
  }
}

void Scheduler::start_running(Sequence& sequence) {
  sequence.state = SequenceState::running;
  if (running_.empty() || ByRank()(running_.back(), &sequence)) {
    running_.push_back(&sequence);
  } else {
    running_.insert(std::upper_bound(running_.begin(), running_.end(), &sequence, ByRank()), &sequence);
  }
}

void Scheduler::alloc_row(Sequence& sequence) {
  num_free_rows_ -= 1 + sequence.pending_forks;
  sequence.row = free_rows_.back();
  free_rows_.pop_back();
  sequence.table.blocks = block_table.data() + static_cast<size_t>(sequence.row) * max_blocks_per_seq;
  sequence.table.group_stride = static_cast<int64_t>(config_.max_num_seqs) * max_blocks_per_seq;
  sequence.table.max_blocks = max_blocks_per_seq;
}

void Scheduler::free_row(Sequence& sequence) {
  num_free_rows_ += 1 + sequence.pending_forks;
  free_rows_.push_back(sequence.row);
  sequence.row = -1;
}

void Scheduler::take_state_row(Sequence& sequence) {
  if (free_state_rows_.empty()) {
    sequence.state_row = num_state_rows_++;
  } else {
    sequence.state_row = free_state_rows_.back();
    free_state_rows_.pop_back();
  }
}

// Preemption

void Scheduler::preempt(Sequence& sequence) {
  running_.pop_back();
  if (sequence.is_beam && !running_.empty() && running_.back()->handle == sequence.handle) preempt(*running_.back());
  may_admit_ = false;
  preempted.push_back(sequence.id);
  if (++sequence.num_preemptions >= config_.starvation_limit) sequence.boosted = true;
  if (swap_is_better(sequence)) {
    blocks_.swap_out(sequence.table, blocks_.blocks_for(sequence.num_computed), sequence.host_blocks, swap_out);
    sequence.state = SequenceState::swapped;
    swapped_.insert(&sequence);
    plan_->swapped_out.emplace_back(&sequence, sequence.id);
    ++sequence.in_flight;
    ++stats_.preemptions_by_swap;
  } else {
    blocks_.free(sequence.table);
    restart(sequence);
    ++stats_.preemptions_by_recompute;
  }
  free_row(sequence);
}

void Scheduler::restart(Sequence& sequence) {
  sequence.num_computed = 0;
  sequence.decoding = false;
  enqueue(sequence);
}

void Scheduler::recompute_all(bool swapped) {
  if (num_in_flight_ > 0)
    throw std::logic_error(std::to_string(num_in_flight_) + " steps have had neither update() nor fail_step()");
  blocks_.reset_prefix_cache(swapped);
  blocked_ = nullptr;
  next_row_copies_.clear();
  for (Sequence* sequence : running_) {
    blocks_.free(sequence->table);
    free_row(*sequence);
    restart(*sequence);
  }
  running_.clear();
  if (!swapped) return;
  for (Sequence* sequence : swapped_) {
    blocks_.free_host(sequence->host_blocks);
    restart(*sequence);
  }
  swapped_.clear();
}

std::vector<BlockId> Scheduler::live_blocks(bool running) const {
  std::vector<bool> is_live(static_cast<size_t>(config_.blocks.num_device_blocks));
  for (BlockId block = 0; block < config_.blocks.num_device_blocks; ++block) is_live[block] = blocks_.is_cached(block);
  if (running) {
    for (const Sequence* sequence : running_) {
      const int32_t computed = blocks_.blocks_for(sequence->num_computed);
      for (int32_t group = 0; group < blocks_.num_groups(); ++group)
        for (int32_t i = sequence->table.first[group]; i < computed; ++i)
          is_live[sequence->table.blocks[group * sequence->table.group_stride + i]] = true;
    }
  }
  std::vector<BlockId> blocks;
  for (BlockId block = 0; block < config_.blocks.num_device_blocks; ++block)
    if (is_live[block]) blocks.push_back(block);
  return blocks;
}

bool Scheduler::swap_is_better(const Sequence& sequence) const {
  if (config_.preemption_mode == PreemptionMode::recompute || sequence.num_computed == 0 || sequence.is_beam) return false;
  const int32_t keep = blocks_.blocks_for(sequence.num_computed);
  if (blocks_.can_swap_out(sequence.table, keep) != AllocStatus::ok) return false;
  if (config_.preemption_mode == PreemptionMode::swap) return true;
  const auto moved = static_cast<double>(blocks_.held_blocks(sequence.table, keep));
  return 2.0 * moved * config_.swap_seconds_per_block < sequence.num_computed * config_.recompute_seconds_per_token;
}

// Results of a step

const Finished& Scheduler::update(const int64_t* sampled, int64_t count, const int64_t* drafted, const std::vector<int32_t>& failed_loads) {
  const int64_t expected = num_in_flight_ > 0 ? plans_[oldest_].counts.num_samples : 0;
  if (count != expected)
    throw std::invalid_argument("the step has " + std::to_string(expected) + " samples, and got " + std::to_string(count) + " tokens");
  if (config_.drafts.by_model && drafted == nullptr && expected > 0 && plans_[oldest_].counts.num_drafted > 0)
    throw std::invalid_argument("a model makes the step's drafts, and they were not given");
  uint64_t all = 0;
  // -1 stands for a token that there is not.
  for (int64_t i = 0; i < count; ++i) all |= sampled[i] == -1 ? 0 : static_cast<uint64_t>(sampled[i]);
  if (all > static_cast<uint64_t>(kNever)) throw std::invalid_argument("a sampled token is below -1 or does not fit int32");
  const size_t num_loads = num_in_flight_ > 0 ? plans_[oldest_].tier_loads.size() : 0;
  if (!std::is_sorted(failed_loads.begin(), failed_loads.end()) ||
      (!failed_loads.empty() && (failed_loads.front() < 0 || static_cast<size_t>(failed_loads.back()) >= num_loads)))
    throw std::invalid_argument("the step has " + std::to_string(num_loads) + " loads, and others are said to have failed");

  finished_.ids.clear();
  finished_.reasons.clear();
  kept_.clear();
  may_drop_samples_ = false;
  if (num_in_flight_ == 0) return finished_;
  const Plan& plan = take_oldest();
  book_tiers(plan, &failed_loads);
  for (const auto& [sequence, id] : plan.swapped_out)
    if (sequence->id == id) --sequence->in_flight;
  const StepCounts& step = plan.counts;
  may_drop_samples_ = step.num_drafted > 0;
  for (int32_t row = 0; row < step.num_decodes; ++row) {
    if (row + kRegistrationDistance < step.num_decodes) {
      const Sequence& ahead = *plan.sequences[row + kRegistrationDistance];
      if (ahead.num_tokens >= ahead.register_at && ahead.state == SequenceState::running)
        blocks_.prefetch_registration(ahead.table, ahead.tokens, ahead.num_tokens);
    }
    if (may_drop_samples_) kept_.push_back(row);
    Sequence* sequence = plan.sequences[row];
    if (sequence->id != plan.seq_ids[row] || sequence->state == SequenceState::finished) continue;
    --sequence->in_flight;
    computed(*sequence, sequence->num_tokens);
    accept(*sequence, static_cast<int32_t>(sampled[row]));
  }
  int32_t sample = step.num_decodes;
  for (int32_t row = step.num_decodes; row < step.num_seqs; ++row) {
    const int32_t first = sample;
    while (sample < step.num_samples && plan.sample_rows[sample] == row) ++sample;
    if (row < step.num_decodes + step.num_drafted) {
      book_drafted(plan, row, first, sampled, drafted);
      continue;
    }
    for (int32_t i = first; i < sample && may_drop_samples_; ++i) kept_.push_back(i);
    Sequence* sequence = plan.sequences[row];
    if (sequence->id != plan.seq_ids[row] || sequence->state == SequenceState::finished) continue;
    --sequence->in_flight;
    computed(*sequence, plan.context_lens[row]);
    if (sequence->pooling && plan.context_lens[row] == sequence->prompt_len) {
      end(*sequence, FinishReason::pooled);
      report(*sequence, FinishReason::pooled);
      continue;
    }
    if (sample > first && sequence->pending_forks > 0) fork(*sequence);
    for (int32_t i = first; i < sample; ++i) {
      Sequence* sampled_for = find_unfinished(plan.sample_seq_ids[i]);
      if (sampled_for != nullptr) accept(*sampled_for, static_cast<int32_t>(sampled[i]));
    }
  }
  if (has_ended_) sweep_running();
  return finished_;
}

// What was loaded is computed, up to the first load that failed. `failed_loads`: null for a step that was not done.
void Scheduler::book_tiers(const Plan& plan, const std::vector<int32_t>* failed_loads) {
  kv::PrefixTiers& tiers = blocks_.tiers();
  if (failed_loads == nullptr) {
    for (const kv::TierMove& move : plan.tier_stores) tiers.drop(static_cast<kv::TierSlot>(move.to), move.tag);
  } else {
    for (const int32_t i : *failed_loads) {
      tiers.drop(static_cast<kv::TierSlot>(plan.tier_loads[i].from), plan.tier_loads[i].tag);
      tiers.count_failed_load();
    }
  }
  int32_t first = 0;
  for (const Load& load : plan.loads) {
    const auto count = static_cast<int32_t>(load.slots.size());
    int32_t good = failed_loads == nullptr ? 0 : count;
    if (failed_loads != nullptr) {
      const auto failed = std::lower_bound(failed_loads->begin(), failed_loads->end(), first);
      if (failed != failed_loads->end()) good = std::min(good, *failed - first);
    }
    first += count;
    for (auto slot = load.slots.rbegin(); slot != load.slots.rend(); ++slot) tiers.release(*slot);
    Sequence& sequence = *load.sequence;
    if (sequence.id != load.id || sequence.state == SequenceState::finished) continue;
    --sequence.in_flight;
    sequence.is_loading = false;
    if (sequence.state != SequenceState::running || good == 0) continue;
    sequence.num_computed += good * config_.blocks.block_size;
    if (load.is_first) sequence.num_cached = sequence.num_computed;
    computed(sequence, sequence.num_computed);
  }
}

// Takes the samples of a row with drafts up to the first that is not what was guessed: the row's next token was the wrong one.
void Scheduler::book_drafted(const Plan& plan, int32_t row, int32_t sample, const int64_t* sampled, const int64_t* drafted) {
  Sequence* sequence = plan.sequences[row];
  if (sequence->id != plan.seq_ids[row] || sequence->state == SequenceState::finished) return;
  --sequence->in_flight;
  sequence->runs_ahead = sequence->plan_ahead;
  const int32_t num_drafts = plan.query_start[row + 1] - plan.query_start[row] - 1;
  const int64_t* guesses = config_.drafts.by_model ? drafted + sample : plan.token_ids.data() + plan.query_start[row] + 1;
  if (config_.drafts.by_model && sequence->has_drafter) sequence->drafter->guessed(guesses, num_drafts);
  for (int32_t i = 0;; ++i) {
    const int64_t token = sampled[sample + i];
    kept_.push_back(sample + i);
    computed(*sequence, sequence->num_tokens);
    accept(*sequence, static_cast<int32_t>(token));
    const bool is_right = i < num_drafts && token == guesses[i];
    if (is_right) {
      ++draft_stats_.num_accepted_tokens;
      ++draft_stats_.accepted_at[static_cast<size_t>(i)];
    }
    if (!is_right || sequence->state == SequenceState::finished) break;
  }
  sequence->num_computed = std::min(sequence->num_computed, sequence->num_tokens - 1);
}

Plan& Scheduler::take_oldest() {
  Plan& plan = plans_[oldest_];
  oldest_ = (oldest_ + 1) % plans_.size();
  --num_in_flight_;
  return plan;
}

// The first `num_computed` tokens were computed, in the sequence's own blocks unless it was preempted since.
void Scheduler::computed(Sequence& sequence, int32_t num_computed) {
  if (num_computed < sequence.register_at || sequence.state != SequenceState::running) return;
  const int32_t size = config_.blocks.block_size;
  blocks_.register_computed(sequence.table, sequence.tokens, num_computed);
  // Steps in flight are of later queries, which see no more of the earlier keys than the next one.
  if (blocks_.has_windows()) blocks_.free_unseen(sequence.table, num_computed);
  const bool comes_again = config_.blocks.enable_prefix_caching || blocks_.has_windows();
  sequence.register_at = comes_again ? (num_computed / size + 1) * size : kNever;
}

void Scheduler::accept(Sequence& sequence, int32_t token) {
  if (token < 0) {
    end(sequence, FinishReason::error);
    report(sequence, FinishReason::error);
    return;
  }
  if (sequence.is_beam) {
    sequence.is_sampled = true;
    return;
  }
  if (sequence.has_drafter) sequence.drafter->note(sequence.num_tokens, token, trust_);
  append(sequence, token);
  if (sequence.num_tokens < sequence.room_until && !(sequence.stop_filter & filter_bit(token))) return;
  const FinishReason reason = stop_reason(sequence, token);
  if (reason == FinishReason::none) return;
  end(sequence, reason);
  report(sequence, reason);
}

void Scheduler::append(Sequence& sequence, int32_t token) {
  sequence.tokens[sequence.num_tokens++] = token;
  if (sequence.num_tokens == sequence.room_until && sequence.room_until < sequence.max_total)
    reserve_tokens(sequence, std::min<int64_t>(sequence.max_total, 2 * static_cast<int64_t>(sequence.room_until)));
}

FinishReason Scheduler::stop_reason(const Sequence& sequence, int32_t token) const {
  if (sequence.num_tokens >= sequence.min_total) {
    bool stops = false;
    for (const int32_t id : sequence.stop_ids) stops |= id == token;
    if (sequence.many_stop_ids)
      stops = std::binary_search(sequence.more_stop_ids.begin(), sequence.more_stop_ids.end(), token);
    if (stops) return FinishReason::stop;
  }
  return sequence.num_tokens >= sequence.max_total ? FinishReason::length : FinishReason::none;
}

void Scheduler::fork(Sequence& parent) {
  const bool shares_blocks = parent.state == SequenceState::running;
  const int32_t forks = parent.pending_forks;
  parent.pending_forks = 0;
  parent.runs_ahead = parent.plan_ahead;
  if (shares_blocks) num_free_rows_ += forks;
  for (int32_t i = 1; i <= forks; ++i) {
    Sequence* unfinished = find_unfinished(parent.id + i);
    if (unfinished == nullptr) continue;
    Sequence& child = *unfinished;
    reserve_tokens(child, static_cast<int64_t>(parent.storage.size()));
    std::copy(parent.tokens, parent.tokens + parent.num_tokens, child.tokens);
    child.num_tokens = parent.num_tokens;
    child.num_cached = parent.num_cached;
    // With them beams are boosted at once, and stay neighbours in rank.
    child.num_preemptions = parent.num_preemptions;
    child.num_passed_over = parent.num_passed_over;
    child.boosted = parent.boosted;
    if (!shares_blocks) {  // the parent was preempted while its prompt was in flight
      restart(child);
      continue;
    }
    alloc_row(child);
    copy_rows({{parent.row, child.row}});
    blocks_.fork(parent.table, child.table, parent.num_computed);
    child.num_computed = parent.num_computed;
    child.register_at = parent.register_at;
    child.bookkeeping_at = 0;
    child.decoding = true;
    start_running(child);
  }
  parent.bookkeeping_at = 0;
}

std::vector<Sequence*> Scheduler::beams_of(int64_t handle) const {
  std::vector<Sequence*> beams;
  const auto forks = forks_of_.find(handle);
  const int32_t n = forks == forks_of_.end() ? 1 : forks->second.n;
  for (int32_t i = 0; i < n; ++i) {
    Sequence* beam = find_unfinished(handle + i);
    if (beam != nullptr && beam->is_beam) beams.push_back(beam);
  }
  return beams;
}

bool Scheduler::beams_sampled(int64_t handle) const {
  const std::vector<Sequence*> beams = beams_of(handle);
  return !beams.empty() && std::all_of(beams.begin(), beams.end(), [](const Sequence* beam) { return beam->is_sampled; });
}

// All copies of a plan are of what the rows held before: what a pending copy would have written is taken from where that takes it.
void Scheduler::copy_rows(std::vector<BlockPair> copied) {
  for (BlockPair& pair : copied)
    for (const BlockPair& pending : next_row_copies_)
      if (pending.second == pair.first) {
        pair.first = pending.first;
        break;
      }
  for (const BlockPair& pair : copied) {
    // The row's owner before, which ended or became another beam, needs no copy any more.
    const auto is_overwritten = [&](const BlockPair& pending) { return pending.second == pair.second; };
    next_row_copies_.erase(std::remove_if(next_row_copies_.begin(), next_row_copies_.end(), is_overwritten), next_row_copies_.end());
    if (pair.first != pair.second) next_row_copies_.push_back(pair);
  }
}

void Scheduler::advance_beams(int64_t handle, const std::vector<int32_t>& parents, const std::vector<int32_t>& tokens) {
  const std::vector<Sequence*> beams = beams_of(handle);
  const size_t count = beams.size();
  bool is_valid = beams_sampled(handle) && parents.size() == count && tokens.size() == count;
  for (const int32_t parent : parents) is_valid = is_valid && parent >= 0 && static_cast<size_t>(parent) < count;
  for (const Sequence* beam : beams) is_valid = is_valid && beam->num_tokens < beam->max_total;
  if (!is_valid) throw std::invalid_argument("the beams were not all sampled, or do not have a parent and a token each");
  // They run all, or wait all: only then they have blocks.
  if (beams.front()->state == SequenceState::running) {
    std::vector<kv::BlockTable*> tables;
    for (Sequence* beam : beams) tables.push_back(&beam->table);
    blocks_.reassign(tables, parents, beams.front()->num_computed);
    std::vector<BlockPair> rows;
    for (size_t i = 0; i < count; ++i)
      if (static_cast<size_t>(parents[i]) != i) rows.emplace_back(beams[parents[i]]->row, beams[i]->row);
    copy_rows(std::move(rows));
  }
  std::vector<std::vector<int32_t>> before;
  for (const Sequence* beam : beams) before.emplace_back(beam->tokens, beam->tokens + beam->num_tokens);
  std::vector<int32_t> register_at;
  for (const Sequence* beam : beams) register_at.push_back(beam->register_at);
  for (size_t i = 0; i < count; ++i) {
    Sequence& beam = *beams[i];
    std::copy(before[parents[i]].begin(), before[parents[i]].end(), beam.tokens);
    append(beam, tokens[i]);
    beam.register_at = register_at[parents[i]];
    beam.bookkeeping_at = 0;
    beam.is_sampled = false;
  }
}

// Takes a sequence out of the queue or pool that has it, and its blocks and rows from it. It stays in running_ until sweep_running().
void Scheduler::end(Sequence& sequence, FinishReason reason) {
  switch (sequence.state) {
    case SequenceState::finished:
      return;
    case SequenceState::dormant:
      break;
    case SequenceState::waiting:
      dequeue(sequence);
      break;
    case SequenceState::swapped:
      swapped_.erase(&sequence);
      blocks_.free_host(sequence.host_blocks);
      break;
    case SequenceState::running:
      blocks_.free(sequence.table);
      free_row(sequence);
      has_ended_ = true;
      break;
  }
  sequence.pending_forks = 0;
  sequence.state = SequenceState::finished;
  sequence.finish_reason = reason;
  sequence.decoding = sequence.is_sampled = false;
}

void Scheduler::report(Sequence& sequence, FinishReason reason) {
  finished_.ids.push_back(sequence.id);
  finished_.reasons.push_back(static_cast<int64_t>(reason));
}

void Scheduler::sweep_running() {
  running_.erase(std::remove_if(running_.begin(), running_.end(),
                                [](const Sequence* s) { return s->state != SequenceState::running; }),
                 running_.end());
  has_ended_ = false;
}

const Finished& Scheduler::fail_step() {
  finished_.ids.clear();
  finished_.reasons.clear();
  if (num_in_flight_ == 0) return finished_;
  const Plan& plan = take_oldest();
  book_tiers(plan, nullptr);
  for (int32_t row = 0; row < plan.counts.num_seqs; ++row) {
    Sequence* sequence = plan.sequences[row];
    if (sequence->id != plan.seq_ids[row] || sequence->state == SequenceState::finished) continue;
    const int64_t last = sequence->id + sequence->pending_forks;
    for (int64_t id = sequence->id; id <= last; ++id) {
      Sequence* affected = find_unfinished(id);
      if (affected == nullptr) continue;
      end(*affected, FinishReason::error);
      report(*affected, FinishReason::error);
    }
  }
  for (const auto& [sequence, id] : plan.swapped_out) {
    if (sequence->id != id) continue;
    --sequence->in_flight;
    if (sequence->state != SequenceState::swapped) continue;
    swapped_.erase(sequence);
    blocks_.free_host(sequence->host_blocks);
    restart(*sequence);
  }
  sweep_running();
  return finished_;
}

// Ending from outside

void Scheduler::abort(const std::vector<int64_t>& handles) {
  for (const int64_t handle : handles) {
    const auto forks = forks_of_.find(handle);
    const int32_t n = forks == forks_of_.end() ? 1 : forks->second.n;
    for (int32_t i = 0; i < n; ++i) {
      const auto it = by_id_.find(handle + i);
      if (it != by_id_.end()) end(*it->second, FinishReason::abort);
    }
  }
  if (has_ended_) sweep_running();
}

bool Scheduler::finish(int64_t id, FinishReason reason) {
  Sequence* sequence = find_unfinished(id);
  if (sequence == nullptr) return false;
  if (sequence->pending_forks > 0)
    throw std::invalid_argument("a sequence that carries the prompt of its forks can only be aborted with its request");
  end(*sequence, reason);
  if (has_ended_) sweep_running();
  return true;
}

void Scheduler::release(const std::vector<int64_t>& ids) {
  for (const int64_t id : ids) {
    const auto it = by_id_.find(id);
    if (it == by_id_.end() || it->second->state != SequenceState::finished)
      throw std::invalid_argument("sequence " + std::to_string(id) + " is unknown or has not ended");
  }
  for (const int64_t id : ids) {
    const auto it = by_id_.find(id);
    if (it == by_id_.end()) continue;
    Sequence* sequence = it->second;
    blocks_.names().release_root(sequence->table.root);
    by_id_.erase(it);
    const auto forks = forks_of_.find(sequence->handle);
    if (forks != forks_of_.end() && --forks->second.num_unreleased == 0) forks_of_.erase(forks);
    if (sequence->state_row >= 0) free_state_rows_.push_back(sequence->state_row);
    *sequence = Sequence{};
    free_sequences_.push_back(sequence);
  }
}

SchedulerStats Scheduler::stats() const {
  SchedulerStats stats = stats_;
  stats.num_running = static_cast<int64_t>(running_.size());
  stats.num_waiting = static_cast<int64_t>(waiting_.size());
  stats.num_swapped = static_cast<int64_t>(swapped_.size());
  stats.num_unreleased = static_cast<int64_t>(by_id_.size());
  return stats;
}

std::string Scheduler::check() const {
  std::vector<const kv::BlockTable*> tables;
  std::vector<const std::vector<BlockId>*> host_tables;
  int32_t rows_used = 0, rows_promised = 0;
  std::set<int32_t> distinct_rows, distinct_state_rows(free_state_rows_.begin(), free_state_rows_.end());
  for (const auto& [id, sequence] : by_id_) {
    if (sequence->state_row >= 0 && !distinct_state_rows.insert(sequence->state_row).second)
      return "a row of the worker's state has two owners";
    if (sequence->state == SequenceState::running) {
      tables.push_back(&sequence->table);
      ++rows_used;
      rows_promised += sequence->pending_forks;
      if (!distinct_rows.insert(sequence->row).second) return "two running sequences share a row";
      if (sequence->table.num_blocks < blocks_.blocks_for(sequence->num_computed))
        return "a sequence has fewer blocks than computed tokens";
    } else if (sequence->row != -1) {
      return "a sequence that does not run has a row";
    } else if (sequence->table.num_blocks != 0) {
      return "a sequence that does not run has device blocks";
    }
    host_tables.push_back(&sequence->host_blocks);
    for (const Sequence* beam : sequence->is_beam ? beams_of(sequence->handle) : std::vector<Sequence*>{})
      if (sequence->state != SequenceState::finished && beam->state != sequence->state &&
          beam->state != SequenceState::dormant && sequence->state != SequenceState::dormant)
        return "beams of one search run and wait at the same time";
    if (sequence->num_tokens > sequence->max_total && sequence->max_total > sequence->prompt_len)
      return "a sequence is longer than its limit";
  }
  if (rows_used != static_cast<int32_t>(running_.size())) return "the running list does not hold the running sequences";
  if (!std::is_sorted(running_.begin(), running_.end(), ByRank())) return "the running list is not in rank order";
  if (num_free_rows_ != config_.max_num_seqs - rows_used - rows_promised) return "free rows are miscounted";
  if (static_cast<int32_t>(free_rows_.size()) != config_.max_num_seqs - rows_used) return "a row is lost";
  if (static_cast<int32_t>(distinct_state_rows.size()) != num_state_rows_) return "a row of the worker's state is lost";
  return blocks_.check(tables, host_tables);
}

}  // namespace hardpoint::scheduler
