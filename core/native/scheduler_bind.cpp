// Python binding of the scheduler.
#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include "bind.hpp"
#include "kv_token_input.hpp"
#include "scheduler.hpp"

namespace hardpoint {
namespace {

namespace py = pybind11;
using kv::BlockStats;
using scheduler::DraftStats;
using scheduler::BlockPair;
using scheduler::Finished;
using scheduler::FinishReason;
using scheduler::Plan;
using scheduler::Policy;
using scheduler::PreemptionMode;
using scheduler::Request;
using scheduler::Scheduler;
using scheduler::SchedulerConfig;
using scheduler::SchedulerStats;
using scheduler::Sequence;
using scheduler::SequenceState;
using scheduler::StepCounts;

// Take a setting of hardpoint.scheduler.SchedulerConfig, which has checked it; None leaves the default.
template <class T>
void take(const py::object& settings, const char* name, T& value) {
  const py::object given = settings.attr(name);
  if (!given.is_none()) value = given.cast<T>();
}

SchedulerConfig config_from(const py::object& settings) {
  SchedulerConfig config;
  take(settings, "block_size", config.blocks.block_size);
  take(settings, "num_device_blocks", config.blocks.num_device_blocks);
  take(settings, "num_host_blocks", config.blocks.num_host_blocks);
  take(settings, "num_tier_host_blocks", config.blocks.num_tier_host_blocks);
  take(settings, "num_tier_disk_blocks", config.blocks.num_tier_disk_blocks);
  take(settings, "watermark", config.blocks.watermark);
  take(settings, "enable_prefix_caching", config.blocks.enable_prefix_caching);
  take(settings, "hash_bits", config.blocks.hash_bits);
  take(settings, "group_windows", config.blocks.windows);
  take(settings, "max_num_seqs", config.max_num_seqs);
  take(settings, "max_num_batched_tokens", config.max_num_batched_tokens);
  take(settings, "max_model_len", config.max_model_len);
  take(settings, "enable_chunked_prefill", config.enable_chunked_prefill);
  take(settings, "long_prefill_token_threshold", config.long_prefill_token_threshold);
  take(settings, "mixed_prefill_budget", config.mixed_prefill_tokens);
  take(settings, "num_lookahead_slots", config.num_lookahead_slots);
  take(settings, "num_speculative_tokens", config.drafts.num_tokens);
  take(settings, "num_draft_slots", config.drafts.num_slots);
  take(settings, "drafts_by_model", config.drafts.by_model);
  take(settings, "prompt_lookup_min", config.drafts.lookup_min);
  take(settings, "prompt_lookup_max", config.drafts.lookup_max);
  take(settings, "vocab_size", config.drafts.vocab_size);
  take(settings, "steps_in_flight", config.steps_in_flight);
  take(settings, "swap_seconds_per_block", config.swap_seconds_per_block);
  take(settings, "recompute_seconds_per_token", config.recompute_seconds_per_token);
  take(settings, "starvation_limit", config.starvation_limit);
  const auto mode = settings.attr("preemption_mode").cast<std::string>();
  if (mode == "swap") config.preemption_mode = PreemptionMode::swap;
  if (mode == "recompute") config.preemption_mode = PreemptionMode::recompute;
  if (settings.attr("scheduling_policy").cast<std::string>() == "priority") config.policy = Policy::priority;
  return config;
}

// An array over a buffer of the scheduler, which it keeps alive.
template <class T>
py::array_t<T> view(const py::object& owner, Array<T>& buffer, std::vector<py::ssize_t> shape) {
  return py::array_t<T>(std::move(shape), buffer.data(), owner);
}

py::array_t<int32_t> pairs(const std::vector<BlockPair>& source) {
  py::array_t<int32_t> out({static_cast<py::ssize_t>(source.size()), py::ssize_t{2}});
  int32_t* to = out.mutable_data();
  for (const auto& [from, into] : source) {
    *to++ = from;
    *to++ = into;
  }
  return out;
}

// int64[k, 3].
py::array_t<int64_t> triples(const std::vector<kv::TierMove>& source) {
  py::array_t<int64_t> out({static_cast<py::ssize_t>(source.size()), py::ssize_t{3}});
  int64_t* to = out.mutable_data();
  for (const kv::TierMove& move : source) {
    *to++ = move.from;
    *to++ = move.to;
    *to++ = move.tag;
  }
  return out;
}

py::object finished_or_none(const Finished& finished) {
  if (finished.ids.empty()) return py::none();
  return py::make_tuple(py::cast(finished.ids), py::cast(finished.reasons));
}

const Sequence& sequence_of(const Scheduler& self, int64_t id) {
  if (!self.contains(id)) throw py::key_error(std::to_string(id));
  return self.sequence(id);
}

py::array_t<int32_t> copy_tokens(const Sequence& sequence, int32_t from) {
  const int32_t first = std::min(from, sequence.num_tokens);
  return py::array_t<int32_t>(sequence.num_tokens - first, sequence.tokens + first);
}

// ((tokens, sequences, decodes, samples, sequences with drafts), whether anything moves, which of the plans), or None.
py::object planned(Scheduler& self, const Plan* plan) {
  if (plan == nullptr) return py::none();
  const StepCounts& step = plan->counts;
  const bool moves = !(self.swap_out.empty() && self.swap_in.empty() && self.copies.empty() && self.row_copies.empty() &&
                       self.preempted.empty()) ||
                     self.tiers().has_moves();
  return py::make_tuple(py::make_tuple(step.num_tokens, step.num_seqs, step.num_decodes, step.num_samples, step.num_drafted), moves,
                        plan - self.plans().data());
}

// The arrays of each plan; the slots are those of the first group.
py::list buffers(const py::object& owner) {
  auto& self = owner.cast<Scheduler&>();
  const py::ssize_t seqs = self.config().max_num_seqs, tokens = self.config().max_num_batched_tokens;
  const py::ssize_t samples = self.max_samples();
  py::list plans;
  for (Plan& plan : self.plans())
    plans.append(py::make_tuple(view(owner, plan.token_ids, {tokens}), view(owner, plan.positions, {tokens}),
                                view(owner, plan.slot_mapping, {tokens}), view(owner, plan.query_start, {seqs + 1}),
                                view(owner, plan.context_lens, {seqs}), view(owner, plan.rows, {seqs}),
                                view(owner, plan.state_rows, {seqs}), view(owner, plan.seq_ids, {seqs}),
                                view(owner, plan.sample_rows, {samples}), view(owner, plan.sample_seq_ids, {samples}),
                                view(owner, plan.sample_state_rows, {samples}), view(owner, plan.sample_positions, {samples}),
                                view(owner, plan.sample_tokens, {samples})));
  return plans;
}

// For each group after the first: its block table, and the slots of each plan.
py::list group_buffers(const py::object& owner) {
  auto& self = owner.cast<Scheduler&>();
  const py::ssize_t seqs = self.config().max_num_seqs, tokens = self.config().max_num_batched_tokens;
  py::list groups;
  for (size_t group = 1; group < self.config().blocks.windows.size(); ++group) {
    const py::array_t<int32_t> table({seqs, py::ssize_t{self.max_blocks_per_seq}},
                                     self.block_table.data() + group * seqs * self.max_blocks_per_seq, owner);
    py::list slots;
    for (Plan& plan : self.plans()) slots.append(py::array_t<int32_t>(tokens, plan.slot_mapping.data() + group * tokens, owner));
    groups.append(py::make_tuple(table, slots));
  }
  return groups;
}

}  // namespace

void bind_scheduler(py::module_& m) {
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const TokenRangeError& e) {
      PyErr_SetObject(PyExc_IndexError, py::make_tuple(e.token, e.position).ptr());
    }
  });

  py::native_enum<SequenceState>(m, "SequenceState", "enum.Enum", "Where a sequence is.")
      .value("DORMANT", SequenceState::dormant)
      .value("WAITING", SequenceState::waiting)
      .value("RUNNING", SequenceState::running)
      .value("SWAPPED", SequenceState::swapped)
      .value("FINISHED", SequenceState::finished)
      .finalize();

  py::class_<BlockStats>(m, "BlockStats")
      .def_readonly("device_free", &BlockStats::device_free)
      .def_readonly("device_used", &BlockStats::device_used)
      .def_readonly("host_free", &BlockStats::host_free)
      .def_readonly("host_used", &BlockStats::host_used)
      .def_readonly("cached", &BlockStats::cached)
      .def_readonly("queried_tokens", &BlockStats::queried_tokens)
      .def_readonly("hit_tokens", &BlockStats::hit_tokens)
      .def_readonly("evictions", &BlockStats::evictions);

  py::class_<kv::TierStats>(m, "TierStats")
      .def_readonly("host_blocks", &kv::TierStats::host_blocks)
      .def_readonly("disk_blocks", &kv::TierStats::disk_blocks)
      .def_readonly("queries", &kv::TierStats::queries)
      .def_readonly("host_hits", &kv::TierStats::host_hits)
      .def_readonly("disk_hits", &kv::TierStats::disk_hits)
      .def_readonly("stores", &kv::TierStats::stores)
      .def_readonly("demotions", &kv::TierStats::demotions)
      .def_readonly("evictions", &kv::TierStats::evictions)
      .def_readonly("failed_loads", &kv::TierStats::failed_loads);

  py::class_<SchedulerStats>(m, "SchedulerStats")
      .def_readonly("num_running", &SchedulerStats::num_running)
      .def_readonly("num_waiting", &SchedulerStats::num_waiting)
      .def_readonly("num_swapped", &SchedulerStats::num_swapped)
      .def_readonly("num_unreleased", &SchedulerStats::num_unreleased)
      .def_readonly("preemptions_by_swap", &SchedulerStats::preemptions_by_swap)
      .def_readonly("preemptions_by_recompute", &SchedulerStats::preemptions_by_recompute);

  py::class_<DraftStats>(m, "DraftStats")
      .def_readonly("num_drafts", &DraftStats::num_drafts)
      .def_readonly("num_draft_tokens", &DraftStats::num_draft_tokens)
      .def_readonly("num_accepted_tokens", &DraftStats::num_accepted_tokens)
      .def_readonly("accepted_at", &DraftStats::accepted_at);

  py::class_<Scheduler>(m, "SchedulerCore")
      .def(py::init([](const py::object& given) { return std::make_unique<Scheduler>(config_from(given)); }),
           py::arg("config"))
      .def("add_request",
           [](Scheduler& self, py::object prompt, int64_t token_limit, int32_t n, int64_t max_tokens, int64_t min_tokens,
              std::vector<int32_t> stop_token_ids, int32_t priority, int64_t arrival, std::string salt,
              int64_t max_cached_tokens, bool pooling, bool plan_ahead, bool beams, bool drafts) {
             Request request;
             request.prompt = token_ids_from(prompt, token_limit, std::min(max_tokens, scheduler::kReservedOutput));
             request.n = n;
             request.max_tokens = max_tokens;
             request.min_tokens = min_tokens;
             request.stop_token_ids = std::move(stop_token_ids);
             request.priority = priority;
             request.arrival = arrival;
             request.salt = std::move(salt);
             request.max_cached_tokens = max_cached_tokens;
             request.pooling = pooling;
             request.plan_ahead = plan_ahead;
             request.beams = beams;
             request.drafts = drafts;
             return self.add_request(std::move(request));
           })
      .def("schedule", [](Scheduler& self) { return planned(self, self.schedule()); })
      .def("store_cached", [](Scheduler& self) { return planned(self, self.store_cached()); })
      .def("drop_stored", &Scheduler::drop_stored)
      .def("update",
           [](Scheduler& self, const py::array_t<int64_t, py::array::c_style>& sampled,
              const py::array_t<int64_t, py::array::c_style>& drafted, const std::vector<int32_t>& failed_loads) {
             if (drafted.size() > 0 && drafted.size() != sampled.size())
               throw std::invalid_argument("there are " + std::to_string(sampled.size()) + " samples, and " +
                                           std::to_string(drafted.size()) + " tokens that were drafted");
             const int64_t* guesses = drafted.size() > 0 ? drafted.data() : nullptr;
             return finished_or_none(self.update(sampled.data(), sampled.size(), guesses, failed_loads));
           })
      .def("fail_step", [](Scheduler& self) { return finished_or_none(self.fail_step()); })
      .def("beams_sampled", &Scheduler::beams_sampled)
      .def("advance_beams", &Scheduler::advance_beams)
      .def("abort", &Scheduler::abort)
      .def("finish", [](Scheduler& self, int64_t id, int reason) { return self.finish(id, static_cast<FinishReason>(reason)); })
      .def("recompute_all", &Scheduler::recompute_all, py::arg("swapped"))
      .def("live_blocks",
           [](const Scheduler& self, bool running) {
             const std::vector<scheduler::BlockId> blocks = self.live_blocks(running);
             return py::array_t<int32_t>(static_cast<py::ssize_t>(blocks.size()), blocks.data());
           },
           py::arg("running"))
      .def("release", &Scheduler::release)
      .def("has_unfinished", &Scheduler::has_unfinished)
      .def("state", [](const Scheduler& self, int64_t id) { return sequence_of(self, id).state; })
      .def("finish_reason",
           [](const Scheduler& self, int64_t id) { return static_cast<int>(sequence_of(self, id).finish_reason); })
      .def("num_cached_tokens", [](const Scheduler& self, int64_t id) { return std::max(sequence_of(self, id).num_cached, 0); })
      .def("num_tokens", [](const Scheduler& self, int64_t id) { return sequence_of(self, id).num_tokens; })
      .def("num_preemptions", [](const Scheduler& self, int64_t id) { return sequence_of(self, id).num_preemptions; })
      .def("all_tokens", [](const Scheduler& self, int64_t id) { return copy_tokens(sequence_of(self, id), 0); })
      .def("output_tokens",
           [](const Scheduler& self, int64_t id) {
             const Sequence& sequence = sequence_of(self, id);
             return copy_tokens(sequence, sequence.prompt_len);
           })
      .def("buffers", &buffers)
      .def("group_buffers", &group_buffers)
      .def("block_table",
           [](const py::object& owner) {
             auto& self = owner.cast<Scheduler&>();
             return view(owner, self.block_table, {self.config().max_num_seqs, self.max_blocks_per_seq});
           })
      .def("num_in_flight", &Scheduler::num_in_flight)
      .def("moves",
           [](const Scheduler& self) {
             return py::make_tuple(pairs(self.swap_out), pairs(self.swap_in), pairs(self.copies), pairs(self.row_copies),
                                   py::array_t<int64_t>(static_cast<py::ssize_t>(self.preempted.size()), self.preempted.data()));
           })
      .def("tier_moves",
           [](const Scheduler& self) {
             const kv::PrefixTiers& tiers = self.tiers();
             if (!tiers.has_moves()) return py::object(py::none());
             return py::object(py::make_tuple(triples(tiers.demotions), triples(tiers.stores), triples(tiers.loads)));
           })
      .def("tier_stats", [](const Scheduler& self) { return self.tiers().stats(); })
      .def("kept",
           [](const Scheduler& self) {
             const std::vector<int32_t>* kept = self.kept();
             if (kept == nullptr) return py::object(py::none());
             return py::object(py::array_t<int32_t>(static_cast<py::ssize_t>(kept->size()), kept->data()));
           })
      .def("set_step_cost",
           [](Scheduler& self, double fixed, double per_token) { self.set_step_cost({fixed, per_token}); },
           py::arg("fixed"), py::arg("per_token"))
      .def("draft_stats", &Scheduler::draft_stats)
      .def("stats", &Scheduler::stats)
      .def("block_stats", &Scheduler::block_stats)
      .def("reset_prefix_cache", &Scheduler::reset_prefix_cache)
      .def("check", &Scheduler::check);
}

}  // namespace hardpoint
