// Continuous batching over paged KV blocks: which tokens of which sequences run in the next step.
//
// A sequence is a list of tokens of which the first num_computed have their keys and values in blocks. Prefill, a chunk of it,
// decode, and recomputing after a preemption are one thing: a step computes the next tokens of some sequences, and a sequence
// whose last token is computed gets a new one from update().
//
// Order. Sequences are ranked by (boosted, priority, arrival, id). Running ones go first, then swapped ones come back, then
// waiting ones are admitted, strictly in rank. The victim of a preemption is the running sequence of lowest rank, so the first
// one always makes progress; one that was preempted, or passed over in the queue, `starvation_limit` times is boosted above all
// that are not. Hence nothing starves.
//
// Steps in flight. Steps are planned before the tokens of earlier ones are known: schedule() may be called up to
// `steps_in_flight` times more than update(), which books the oldest step. A token that a step in flight is sampling is -1 in the
// plan. What ends a sequence by its value is seen when it is booked; what later steps computed for it is dropped. Blocks and rows
// are free at once, even those that steps in flight use: the worker runs steps in the order of their plans, so a later step
// writes to them only after earlier ones are done. A preempted sequence waits until no step in flight has it.
//
// Drafts. A decoding sequence may have guesses at its next tokens (drafts.hpp) computed in the same step: a row of several tokens, all of
// which are sampled, in slots that were kept ready. Those that a model makes while the step is computed are -1 in the plan, and update() is
// given them. update() takes the samples up to the first that is not what was guessed; the positions after it are computed again. A guess
// is taken where the model's own draw is that token, so that tokens are those of a run without drafts.
//
// Tiers. Where a prompt goes on in the tiers below the prefix cache (kv_tiers.hpp), its sequence is admitted with loads of these blocks, and
// is planned again when update() has said which of them failed: it computes from the first that did.
//
// Beams. The sequences of a beam search go on together: what is sampled for one is not appended to it, and it is planned again when
// advance_beams() has said, for all of them, which one each continues and with which token. They are admitted and preempted together, so
// that none waits for another one's blocks, and are computed again after a preemption, never swapped.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "drafts.hpp"
#include "kv_array.hpp"
#include "kv_block_manager.hpp"

namespace hardpoint::scheduler {

using kv::AllocStatus;
using kv::BlockId;
using kv::BlockPair;

// Output tokens for which a sequence has memory from the start; longer outputs grow it.
inline constexpr int64_t kReservedOutput = 512;

enum class FinishReason : uint8_t { none = 0, stop = 1, length = 2, abort = 3, pooled = 4, error = 5 };
enum class PreemptionMode { automatic, swap, recompute };
enum class Policy { fcfs, priority };

struct SchedulerConfig {
  kv::BlockManagerConfig blocks;
  int32_t max_num_seqs = 256;
  int32_t max_num_batched_tokens = 2048;
  int32_t max_model_len = 2048;
  bool enable_chunked_prefill = true;
  int32_t long_prefill_token_threshold = 0;  // longest chunk of one prompt in a step; 0: no limit but the budget
  int32_t mixed_prefill_tokens = 2048;       // most prompt tokens of a step for which a decoding sequence waits
  int32_t num_lookahead_slots = 0;
  int32_t steps_in_flight = 0;  // steps that may be planned beyond the oldest one that was not booked
  PreemptionMode preemption_mode = PreemptionMode::automatic;
  double swap_seconds_per_block = 0;
  double recompute_seconds_per_token = 0;
  Policy policy = Policy::fcfs;
  int32_t starvation_limit = 8;
  DraftConfig drafts;
};

struct Request {
  std::vector<int32_t> prompt;
  int32_t n = 1;
  int64_t max_tokens = 16;
  int64_t min_tokens = 0;
  std::vector<int32_t> stop_token_ids;
  int32_t priority = 0;  // lower is served earlier
  int64_t arrival = 0;
  std::string salt;
  int64_t max_cached_tokens = 0;  // that the prefix cache may give
  bool pooling = false;
  bool plan_ahead = true;  // false: each step is planned only when the token before is booked
  bool beams = false;      // the n sequences are those of a beam search
  bool drafts = false;     // guesses at next tokens are verified
};

enum class SequenceState : uint8_t {
  dormant,  // a fork whose prompt is not computed yet
  waiting,
  running,
  swapped,
  finished,
};

// Boosted first, then by priority, arrival and id.
using Rank = std::tuple<bool, int32_t, int64_t, int64_t>;

struct alignas(kCacheLine) Sequence {
  // The first cache line is all that a decode reads and writes in most steps, besides the token itself.
  int64_t id = -1;
  int32_t* tokens = nullptr;  // of `storage`
  int32_t num_tokens = 0;
  int32_t num_computed = 0;    // by steps that were planned, in flight or done
  int32_t slot_offset = 0;     // slot = position + slot_offset, while position < bookkeeping_at
  int32_t bookkeeping_at = 0;  // the first position that needs a look at the block table, or whose token would be one too many
  int32_t register_at = 0;     // when this number of tokens is computed, a block is full and not registered
  int32_t row = -1;            // of the block table, while it runs
  int32_t state_row = -1;      // of the worker's per-sequence state, from its first sample to its release
  int32_t prompt_len = 0;
  int32_t room_until = 0;    // with this number of tokens it ends, or needs memory for more
  uint32_t stop_filter = 0;  // bit `id % 32` of each stop token: a token whose bit is not set does not end it
  SequenceState state = SequenceState::finished;
  bool decoding = false;     // all tokens but the last, sampled one are computed; that one may be in flight
  uint16_t in_flight = 0;    // steps that compute it or swap it out, and are not booked
  bool runs_ahead = true;    // it may be planned while its token is in flight: if its request allows it, its forks are made, and
                             // no guesses at its next tokens are in flight
  bool is_beam = false;
  bool is_sampled = false;  // a beam whose next token waits for the others'
  bool has_drafter = false;

  // The second one is read where a block begins or ends.
  kv::BlockTable table;
  std::array<int32_t, kv::kMaxGroups> group_offsets{};  // slot_offset of the groups after the first

  int32_t max_total = 0;  // tokens, prompt included
  int32_t min_total = 0;
  int32_t stop_ids[4] = {-1, -1, -1, -1};
  bool many_stop_ids = false;
  bool plan_ahead = true;
  bool is_loading = false;  // a step in flight loads blocks of it from the tiers
  FinishReason finish_reason = FinishReason::none;
  int32_t pending_forks = 0;  // dormant sequences id + 1 ... that this one carries the prompt for

  std::vector<int32_t> storage;
  std::vector<int32_t> more_stop_ids;  // sorted; all of them when there are more than four
  std::vector<BlockId> host_blocks;
  int32_t num_cached = -1;  // prompt tokens found in the prefix cache at the first admission
  int64_t handle = 0;       // id of the request's first sequence
  int32_t priority = 0;
  int64_t arrival = 0;
  int32_t num_preemptions = 0, num_passed_over = 0;
  bool boosted = false;
  int64_t max_cached_tokens = 0;
  bool pooling = false;
  std::unique_ptr<Drafter> drafter;  // null where none is wanted

  Rank rank() const { return {!boosted, priority, arrival, id}; }
  int32_t remaining() const { return num_tokens - num_computed; }
  // It is not planned before its sampled token is known.
  bool waits_for_token() const { return is_sampled || (in_flight != 0 && !runs_ahead); }
};
static_assert(offsetof(Sequence, table) == kCacheLine && offsetof(kv::BlockTable, first) <= kCacheLine);

struct StepCounts {
  int32_t num_tokens = 0, num_seqs = 0, num_decodes = 0, num_samples = 0;
  int32_t num_drafted = 0;  // rows of sequences with drafts; they follow the decodes
};

// Blocks of a sequence that a step loads from the tiers, and the slots that hold them until it is booked.
struct Load {
  Sequence* sequence;
  int64_t id;
  bool is_first;  // it has not been admitted before
  std::vector<kv::TierSlot> slots;
};

// One step, planned and not booked.
struct Plan {
  StepCounts counts;
  Array<int64_t> token_ids, positions, seq_ids, sample_seq_ids;
  Array<int32_t> slot_mapping;  // of each group, max_tokens entries
  Array<int32_t> query_start, context_lens, rows, state_rows, sample_rows, sample_state_rows, sample_positions, sample_tokens;
  // Of each row. One whose id differs from the row's was released since.
  std::vector<Sequence*> sequences;
  std::vector<std::pair<Sequence*, int64_t>> swapped_out;  // with their ids
  std::vector<Load> loads;
  std::vector<kv::TierMove> tier_loads, tier_stores;  // demotions are stores too

  Plan(size_t max_tokens, size_t max_seqs, size_t max_samples, size_t num_groups);
};

struct Finished {
  std::vector<int64_t> ids;
  std::vector<int64_t> reasons;
};

struct SchedulerStats {
  int64_t num_running = 0, num_waiting = 0, num_swapped = 0, num_unreleased = 0;
  int64_t preemptions_by_swap = 0, preemptions_by_recompute = 0;
};

class Scheduler {
 public:
  explicit Scheduler(const SchedulerConfig& config);

  // Id of the request's first sequence; the others follow it, in fork order. The caller has checked the request.
  int64_t add_request(Request request);

  // Plans a step; the plan holds until it is booked, the moves below until the next call. Null when nothing can run now. Every
  // plan is answered by one update() or fail_step(); std::logic_error when more than `steps_in_flight` + 1 are not.
  const Plan* schedule();
  // Accounting the oldest step. `sampled`: a token for each of its samples, -1 where there is none, which ends its sequence with `error`. The sequences that ended, in step order. Tokens of sequences
  // that ended meanwhile are ignored. std::invalid_argument, with nothing changed, on a wrong count or token.
  // `drafted`: for each sample what a model guessed there, where guesses are a model's; else null.
  // `failed_loads`: in rising order, which of the step's loads from the tiers failed.
  const Finished& update(const int64_t* sampled, int64_t count, const int64_t* drafted, const std::vector<int32_t>& failed_loads);
  // The oldest step was not done, or only in part: sequences in it end with `error`, since what their blocks hold is unknown;
  // those swapped out in it are recomputed.
  const Finished& fail_step();

  // All sequences of a beam search were sampled since the last advance_beams().
  bool beams_sampled(int64_t handle) const;
  // The i-th sequence becomes that of index parents[i] with one more token. std::invalid_argument, with nothing changed, unless
  // beams_sampled() and there is a parent and a token for each.
  void advance_beams(int64_t handle, const std::vector<int32_t>& parents, const std::vector<int32_t>& tokens);

  // Ends all sequences of the requests. Unknown or finished ones are left as they are.
  void abort(const std::vector<int64_t>& handles);
  // Ends one sequence; false when it is not alive.
  bool finish(int64_t id, FinishReason reason);
  // What the device's blocks hold is lost: running sequences give them back and wait to be computed again from their tokens,
  // and the prefix cache forgets everything. `swapped`: what is on the host, and in the tiers, is lost too. std::logic_error with a step in flight.
  void recompute_all(bool swapped);
  // Plans a step that computes nothing and stores what is cached on the device in the host's tier; null where there is nothing to
  // store. std::logic_error with a step in flight.
  const Plan* store_cached();
  // What the worker could not keep in the tiers: (slot, tag).
  void drop_stored(const std::vector<std::pair<int32_t, int64_t>>& lost);
  // Blocks whose contents count, in rising order: cached ones, and those of running sequences' computed tokens if asked for.
  std::vector<BlockId> live_blocks(bool running) const;
  // Forgets ended sequences and their tokens. std::invalid_argument when one has not ended.
  void release(const std::vector<int64_t>& ids);

  bool has_unfinished() const { return !running_.empty() || !waiting_.empty() || !swapped_.empty(); }
  const Sequence& sequence(int64_t id) const { return *by_id_.at(id); }
  bool contains(int64_t id) const { return by_id_.count(id) != 0; }
  const SchedulerConfig& config() const { return config_; }
  int32_t num_in_flight() const { return num_in_flight_; }
  std::vector<Plan>& plans() { return plans_; }
  SchedulerStats stats() const;
  const DraftStats& draft_stats() const { return draft_stats_; }
  // What steps take, by which drafts are made.
  void set_step_cost(const StepCost& cost) { step_cost_ = cost; }
  int32_t max_samples() const { return config_.max_num_seqs + config_.drafts.num_slots; }
  // Of the step that was booked last, which samples count; null in a step without drafts, where all do.
  const std::vector<int32_t>* kept() const { return may_drop_samples_ ? &kept_ : nullptr; }
  kv::BlockStats block_stats() const { return blocks_.stats(); }
  const kv::PrefixTiers& tiers() const { return blocks_.tiers(); }
  void reset_prefix_cache() { blocks_.reset_prefix_cache(true); }
  // The first invariant that does not hold, or an empty string. Slow; for tests.
  std::string check() const;

  // One for all steps, a table of max_num_seqs rows for each group: a worker reads it before the next schedule().
  Array<BlockId> block_table;
  int32_t max_blocks_per_seq = 0;
  // Moves of the step that was planned last.
  std::vector<BlockPair> swap_out, swap_in, copies;
  // Rows of sequences that were forked, or became another beam, since the plan before, from their parents' rows: what a worker keeps by
  // rows is copied, all at once, as it is after the steps before this one. A destination stands once.
  std::vector<BlockPair> row_copies;
  std::vector<int64_t> preempted;

 private:
  struct ByRank {
    bool operator()(const Sequence* a, const Sequence* b) const { return a->rank() < b->rank(); }
  };
  struct ByArrival {
    bool operator()(const Sequence* a, const Sequence* b) const {
      return std::tie(a->arrival, a->id) < std::tie(b->arrival, b->id);
    }
  };
  struct Forks {
    int32_t n;
    int32_t num_unreleased;
  };
  struct Chunk {
    Sequence* sequence;
    int32_t length;
  };

  Sequence* find_unfinished(int64_t id) const;
  Sequence* new_sequence();
  void set_stop_ids(Sequence& sequence, const std::vector<int32_t>& ids);
  void reserve_tokens(Sequence& sequence, int64_t capacity);

  void schedule_decodes();
  void schedule_prefills();
  void schedule_swapped();
  void schedule_waiting();
  enum class Readiness { ready, complete, preempted };
  Readiness prepare_decode(Sequence& sequence);
  Readiness prepare_beams(size_t first);
  bool reserve_blocks_for_beams(const Sequence& first);
  std::vector<Sequence*> beams_of(int64_t handle) const;
  int32_t chunk_of(const Sequence& sequence) const;
  int32_t planned_tokens() const;  // of prompts, in this step
  AllocStatus admit(Sequence& sequence, bool is_reserved = false);
  void load_from_tiers(Sequence& sequence, bool is_first);
  void book_tiers(const Plan& plan, const std::vector<int32_t>* failed_loads);
  Plan& begin_plan();
  const Plan* end_plan();
  void admit_beams(const Sequence& first);
  void emit_decode(Sequence& sequence, int32_t row);
  int32_t plan_drafts(Sequence& sequence);
  bool awaits_drafts(Sequence& sequence);
  void emit_drafted(Sequence& sequence, int32_t num_drafts);
  void complete_decodes();
  int32_t emit_tokens(Sequence& sequence, int32_t length);
  void emit_sample(const Sequence& sequence, int32_t row, int32_t token, int32_t position);
  void emit_chunk(Sequence& sequence, int32_t length);
  int64_t slots_wanted(int64_t num_tokens) const;
  // Slots of the pool that one sequence can fill: it takes a block of each group.
  int64_t pool_slots() const {
    return static_cast<int64_t>(config_.blocks.num_device_blocks / blocks_.num_groups()) * config_.blocks.block_size;
  }
  void locate(Sequence& sequence, int64_t position);

  void preempt(Sequence& sequence);
  void restart(Sequence& sequence);
  bool swap_is_better(const Sequence& sequence) const;
  void enqueue(Sequence& sequence);
  void dequeue(Sequence& sequence);
  void note_passed_over(const Sequence& admitted);
  void start_running(Sequence& sequence);
  void alloc_row(Sequence& sequence);
  void free_row(Sequence& sequence);
  void take_state_row(Sequence& sequence);

  Plan& take_oldest();
  void book_drafted(const Plan& plan, int32_t row, int32_t sample, const int64_t* sampled, const int64_t* drafted);
  void computed(Sequence& sequence, int32_t num_computed);
  void accept(Sequence& sequence, int32_t token);
  void append(Sequence& sequence, int32_t token);
  void fork(Sequence& parent);
  void copy_rows(std::vector<BlockPair> copied);
  FinishReason stop_reason(const Sequence& sequence, int32_t token) const;
  void end(Sequence& sequence, FinishReason reason);
  void report(Sequence& sequence, FinishReason reason);
  void sweep_running();

  SchedulerConfig config_;
  kv::BlockManager blocks_;
  int32_t num_free_rows_;  // rows not taken and not promised to forks
  std::vector<int32_t> free_rows_;
  int32_t num_state_rows_ = 0;  // ever taken: the next new one
  std::vector<int32_t> free_state_rows_;

  std::deque<Sequence> slab_;
  std::vector<Sequence*> free_sequences_;
  std::unordered_map<int64_t, Sequence*> by_id_;
  std::unordered_map<int64_t, Forks> forks_of_;  // by handle, of requests with n > 1
  int64_t next_id_ = 0;

  std::vector<Sequence*> running_;  // by rank
  std::set<Sequence*, ByRank> waiting_, swapped_;
  std::set<Sequence*, ByArrival> waiting_by_arrival_;  // kept for the priority policy only
  Sequence* blocked_ = nullptr;  // the head of waiting_ when it did not fit, how many blocks were free then, and steps since
  int32_t blocked_free_ = 0;
  int32_t blocked_steps_ = 0;

  std::vector<Plan> plans_;  // a ring
  size_t oldest_ = 0;
  int32_t num_in_flight_ = 0;
  Plan* plan_ = nullptr;  // the one that is being made
  bool may_admit_ = true;  // nothing was preempted in this step, and no sequence that runs waits for a step of its size
  bool has_prefills_ = false;
  bool has_decodes_ = false;  // in this step, or waiting for the token of one in flight
  StepCost step_cost_;
  Trust trust_ = initial_trust();
  DraftStats draft_stats_;
  std::vector<int32_t> kept_;
  bool may_drop_samples_ = false;
  std::vector<kv::TierSlot> found_;  // in the tiers, for the sequence that is admitted
  std::vector<BlockPair> next_row_copies_;  // row_copies of the next plan
  bool has_ended_ = false;  // running_ holds sequences that are no longer running
  int32_t budget_ = 0;
  int32_t draft_slots_ = 0;      // that the step has left
  std::vector<Chunk> drafted_;   // sequences with this many drafts, emitted after the decodes
  std::vector<Chunk> planned_;  // prefill chunks of this step, emitted after the decodes
  Finished finished_;
  SchedulerStats stats_;
};

}  // namespace hardpoint::scheduler
