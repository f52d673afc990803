#include "nccl_substitute.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string_view>

#include "fsdp/error.hpp"
#include "host_streams.hpp"
#include "nccl_substitute_state.hpp"

namespace fsdp::test {
namespace {

using State = NcclSubstitute::State;
State* active = nullptr;

struct Queued {
  ncclComm_t comm;
  StreamHandle stream;
  NcclCall call;
};
thread_local int group_depth = 0;
thread_local std::vector<Queued> group_calls;
thread_local ncclResult_t group_error = ncclSuccess;  // of a call inside of the group, which its end says again

constexpr int kOneSidedWindows = 22900, kSymmetricAverages = 23000;

/// Null if `comm` may be used for something new now.
const char* why_unusable(ncclComm_t comm) {
  if (comm == nullptr) return "null";
  if (comm->state == ncclComm::State::kGone) return comm->is_aborted ? "aborted" : "destroyed";
  if (comm->state != ncclComm::State::kReady) return "not connected, or being finalized";
  if (!comm->held.empty()) return "busy with a launch that is in progress";
  if (comm->registering != nullptr) return "busy with a window that is in progress";
  return nullptr;
}

std::string name_of(ncclComm_t comm) { return comm == nullptr ? "no rank" : fmt::format("rank {}", comm->rank); }

/// Whether NCCL would take a symmetric kernel, on devices that all see each other.
bool is_symmetric(int version, const NcclCall& call, const ncclComm& comm) {
  const bool has_input = comm.window_of(call.input) != nullptr, has_output = comm.window_of(call.output) != nullptr;
  const bool is_gather = call.name == std::string_view("all_gather");
  const bool is_reduction = call.name == std::string_view("reduce_scatter") || call.name == std::string_view("all_reduce");
  if (!is_gather && !is_reduction) return false;
  if (is_reduction && call.op != ncclSum && !(call.op == ncclAvg && version >= kSymmetricAverages)) return false;
  const bool is_small_float = call.dtype == ncclFloat32 || call.dtype == ncclFloat16 || call.dtype == ncclBfloat16;
  if (is_reduction && !is_small_float) return false;
  return version < kOneSidedWindows ? has_input && has_output : is_gather ? has_output : has_input;
}

bool is_at(const std::optional<NcclSubstitute::Place>& place, ncclComm_t comm, int launch) {
  return place && place->rank == comm->rank && place->launch == launch;
}

/// On the stream's thread: meets the other ranks. run: from 0 on; more than one of a launch that a graph replays.
void run_launch(State& state, ncclComm_t comm, int number, int run, const std::vector<NcclCall>& calls) {
  std::unique_lock lock(state.mutex);
  ++comm->running;
  if (is_at(state.options.async_error, comm, number)) {
    comm->error = ncclRemoteError;
    state.last_error = "the peer has closed the connection";
    state.changed.wait(lock, [&] { return comm->is_aborted; });
  }
  if (!comm->is_aborted) {
    auto& meeting = comm->clique->meetings[{number, run}];
    if (!meeting.by_rank.empty() && signature(meeting.by_rank.begin()->second) != signature(calls)) {
      state.misuse(fmt::format("launch {} is {} on rank {} and {} on rank {}", number,
                               signature(meeting.by_rank.begin()->second), meeting.by_rank.begin()->first,
                               signature(calls), comm->rank));
      meeting.has_failed = true;
    }
    meeting.by_rank[comm->rank] = calls;
    if (static_cast<int>(meeting.by_rank.size()) == comm->clique->size && !meeting.has_failed) {
      run_collectives(meeting.by_rank);
      meeting.is_done = true;
    }
    state.changed.notify_all();
    state.changed.wait(lock, [&] { return meeting.is_done || meeting.has_failed || comm->is_aborted; });
    // Its memory may go now, so who comes later finds nobody.
    if (comm->is_aborted && !meeting.is_done) meeting.by_rank.erase(comm->rank);
    if (meeting.has_failed) comm->error = ncclInternalError;
    if (meeting.has_failed) state.changed.wait(lock, [&] { return comm->is_aborted; });
  }
  --comm->running;
  if (run == 0) --comm->queued;
  for (const NcclCall& call : calls)
    if (run == 0 && call.window > 0) comm->windows_in_use.extract(call.window);
  state.changed.notify_all();
}

ncclResult_t launch(std::unique_lock<std::mutex>& lock, ncclComm_t comm, StreamHandle stream,
                    std::vector<NcclCall> calls) {
  State& state = *active;
  const int number = ++comm->launches;
  ++state.launches;
  state.collectives += static_cast<int>(calls.size());
  if (is_at(state.options.blocks, comm, number)) {
    (void)state.await(lock, *comm, [] { return false; });
    return ncclInternalError;
  }
  const bool is_captured = HostStreams::is_diverted(stream);  // of it nothing is queued yet
  if (!is_captured) ++comm->queued;
  if (!comm->blocks) ++state.launch_threads;
  if (auto graph = HostStreams::captured_graph(stream)) comm->graphs.push_back(graph);
  for (const NcclCall& call : calls)
    if (is_symmetric(state.options.version, call, *comm)) ++state.symmetric_kernels;
  for (const NcclCall& call : calls)
    if (call.window > 0) {
      if (!is_captured) comm->windows_in_use.insert(call.window);
      ++(call.name == std::string_view("reduce_scatter") ? state.windowed_reductions : state.windowed_gathers);
    }
  auto start = [&state, comm, number, stream, is_captured, calls = std::move(calls)] {
    HostStreams::enqueue(stream, [&state, comm, number, calls, runs = std::make_shared<int>(is_captured ? 1 : 0)] {
      run_launch(state, comm, number, (*runs)++, calls);
    });
  };
  if (comm->blocks) {
    start();
    return ncclSuccess;
  }
  comm->polls_left = state.options.polls;
  comm->held.push_back(std::move(start));
  return ncclInProgress;
}

// What NCCL's functions are to the library.
namespace entry {

ncclResult_t get_version(int* version) {
  if (active == nullptr) return ncclInternalError;  // of a call that comes back when the substitute has gone
  *version = active->options.version;
  return ncclSuccess;
}

const char* get_error_string(ncclResult_t result) {
  switch (result) {
    case ncclSystemError:
      return "unhandled system error";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    default:
      return "internal error";
  }
}

const char* get_last_error(ncclComm_t /*comm*/) {
  thread_local std::string text;
  if (active == nullptr) return "";
  std::lock_guard lock(active->mutex);
  text = active->last_error;
  return text.c_str();
}

ncclResult_t get_unique_id(ncclUniqueId* id) {
  std::lock_guard lock(active->mutex);
  std::memset(id->internal, 0, sizeof(id->internal));
  const std::string text = fmt::format("id {}", active->ids++);
  std::memcpy(id->internal, text.data(), text.size());
  return ncclSuccess;
}

ncclResult_t comm_init_rank_config(ncclComm_t* made, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  State& state = *active;
  std::unique_lock lock(state.mutex);
  if (config == nullptr) return state.misuse("a communicator is made without a config");
  auto& clique = state.cliques[std::string(id.internal)];
  if (!clique) clique = std::make_shared<Clique>(Clique{.size = size});
  if (clique->size != size || rank < 0 || rank >= size || clique->joined == clique->size)
    return state.misuse(fmt::format("rank {} of {} joins {} of {} ranks", rank, size, clique->joined, clique->size));
  state.comms.push_back(std::make_unique<ncclComm>(ncclComm{.clique = clique, .rank = rank}));
  state.comms.back()->cta_policy = config->CTAPolicy == NCCL_CONFIG_UNDEF_INT ? 0 : config->CTAPolicy;
  *made = state.comms.back().get();
  const ncclComm_t comm = *made;
  comm->owner = active;
  comm->polls_left = state.options.polls;
  comm->blocks = state.options.polls == 0 && config->blocking != 0;
  if (state.options.init_fails_on == rank) {
    comm->error = ncclSystemError;
    state.last_error = "no network interface was found";
    return comm->blocks ? ncclSystemError : ncclInProgress;
  }
  ++clique->joined;
  state.changed.notify_all();
  if (!comm->blocks) return ncclInProgress;
  // As in NCCL, an abort does not reach a call that connects.
  if (!state.await(lock, *comm, [comm] { return comm->clique->joined == comm->clique->size; })) return ncclInternalError;
  comm->state = ncclComm::State::kReady;
  return ncclSuccess;
}

/// Behind all ranks' registration.
void finish_registering(State& state, ncclComm_t comm) {
  *std::exchange(comm->registering, nullptr) = comm->windows.back().get();
  comm->windows.back()->is_registered = true;
  ++state.windows;
}

bool have_all_registered(const ncclComm& comm) {
  return comm.clique->registrations[comm.windows.back()->number].joined == comm.clique->size;
}

/// A call of which nobody knows any more comes back when its substitute has gone.
bool is_left_over(ncclComm_t comm) { return active == nullptr || (comm != nullptr && comm->owner != active); }

ncclResult_t comm_get_async_error(ncclComm_t comm, ncclResult_t* result) {
  if (is_left_over(comm)) return ncclInternalError;
  State& state = *active;
  std::lock_guard lock(state.mutex);
  if (comm == nullptr || comm->state == ncclComm::State::kGone)
    return state.misuse(name_of(comm) + " asks for the errors of a communicator that is gone");
  *result = comm->error;
  if (comm->error != ncclSuccess) return ncclSuccess;
  const bool waits = (comm->state == ncclComm::State::kConnecting && comm->clique->joined < comm->clique->size) ||
                     (comm->state == ncclComm::State::kFinalizing && (comm->queued > 0 || comm->has_graphs())) ||
                     (comm->registering != nullptr && !have_all_registered(*comm));
  if (waits || comm->polls_left > 0) {
    if (!waits) --comm->polls_left;
    *result = ncclInProgress;
    return ncclSuccess;
  }
  if (comm->state == ncclComm::State::kConnecting) comm->state = ncclComm::State::kReady;
  if (comm->registering != nullptr) finish_registering(state, comm);
  for (const auto& start : comm->held) start();
  comm->held.clear();
  return ncclSuccess;
}

ncclResult_t comm_finalize(ncclComm_t comm) {
  State& state = *active;
  std::unique_lock lock(state.mutex);
  if (const char* why = why_unusable(comm)) return state.misuse(fmt::format("finalize of one that is {}", why));
  comm->state = ncclComm::State::kFinalizing;
  if (!comm->blocks) return ncclInProgress;
  return state.await(lock, *comm, [comm] { return comm->queued == 0 && !comm->has_graphs(); }) ? ncclSuccess
                                                                                             : ncclInternalError;
}

ncclResult_t leave(State& state, ncclComm_t comm) {
  comm->state = ncclComm::State::kGone;
  for (const Operator& op : comm->operators)
    if (op.is_alive) return state.misuse(name_of(comm) + " leaves an operator behind");
  for (const auto& window : comm->windows) {
    if (window->is_registered && !comm->is_aborted)
      return state.misuse(fmt::format("{} leaves window {} behind", name_of(comm), window->number));
    window->is_registered = false;  // an abort gives them back
  }
  return ncclSuccess;
}

ncclResult_t comm_destroy(ncclComm_t comm) {
  if (is_left_over(comm)) return ncclInternalError;
  std::lock_guard lock(active->mutex);
  if (comm == nullptr || comm->state != ncclComm::State::kFinalizing || comm->queued > 0)
    return active->misuse(name_of(comm) + " destroys a communicator that was not finalized");
  return leave(*active, comm);
}

ncclResult_t comm_abort(ncclComm_t comm) {
  if (is_left_over(comm)) return ncclInternalError;
  State& state = *active;
  std::unique_lock lock(state.mutex);
  if (comm == nullptr || comm->state == ncclComm::State::kGone)
    return state.misuse(name_of(comm) + " aborts a communicator that is gone");
  if (comm->state == ncclComm::State::kFinalizing && comm->blocks)
    return state.misuse(name_of(comm) + " aborts a communicator whose end another call waits for");
  comm->is_aborted = true;
  state.changed.notify_all();
  // Kernels end before their memory goes, and graphs before what they need.
  ++state.waiting;
  while (!state.has_gone && (comm->running > 0 || comm->has_graphs()))
    state.changed.wait_for(lock, std::chrono::milliseconds(1));
  --state.waiting;
  state.changed.notify_all();
  return state.has_gone ? ncclInternalError : leave(state, comm);
}

ncclResult_t group_start() {
  ++group_depth;
  return ncclSuccess;
}

ncclResult_t group_end() {
  std::unique_lock lock(active->mutex);
  if (group_depth == 0) return active->misuse("a group ends that has not begun");
  if (--group_depth > 0) return ncclSuccess;
  ncclResult_t result = std::exchange(group_error, ncclSuccess);
  const auto calls = std::exchange(group_calls, {});
  if (result != ncclSuccess) return result;  // and nothing of the group is launched
  for (size_t i = 0; i < calls.size();) {
    const auto& first = calls[i];
    std::vector<NcclCall> together;
    for (; i < calls.size() && calls[i].comm == first.comm; ++i) {
      if (calls[i].stream != first.stream) return active->misuse("two streams in one launch");
      together.push_back(calls[i].call);
    }
    result = launch(lock, first.comm, first.stream, std::move(together));
  }
  return result;
}

ncclResult_t misuse_in_group(const std::string& what) {
  const ncclResult_t result = active->misuse(what);
  if (group_depth > 0) group_error = result;
  return result;
}

ncclResult_t add(NcclCall call, ncclComm_t comm, cudaStream_t stream) {
  {
    std::lock_guard lock(active->mutex);
    if (const char* why = why_unusable(comm))
      return misuse_in_group(fmt::format("{} of {} on a communicator that is {}", call.name, name_of(comm), why));
    // NCCL makes the factor itself, of the dtype.
    if (call.op == ncclAvg) call.scale = scalar_in(1.0 / comm->clique->size, call.dtype);
    if (call.op >= ncclNumOps) {
      const auto index = static_cast<size_t>(call.op - ncclNumOps);
      if (index >= comm->operators.size() || !comm->operators[index].is_alive ||
          comm->operators[index].dtype != call.dtype)
        return misuse_in_group(std::string(call.name) + " with an operator that is destroyed, or not of its dtype");
      call.scale = comm->operators[index].scale;
    }
    const void* buffer = buffer_of_all(call);
    if (const auto* window = comm->window_of(buffer)) {
      call.window = window->number;
      call.window_offset = static_cast<size_t>(static_cast<const char*>(buffer) - window->memory);
    }
  }
  if (group_depth > 0) {
    group_calls.push_back({comm, stream, call});
    return ncclSuccess;
  }
  std::unique_lock lock(active->mutex);
  return launch(lock, comm, stream, {call});
}

ncclResult_t all_gather(const void* input, void* output, size_t count, ncclDataType_t dtype, ncclComm_t comm,
                        cudaStream_t stream) {
  return add({"all_gather", input, output, count, dtype}, comm, stream);
}

ncclResult_t reduce_scatter(const void* input, void* output, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                            ncclComm_t comm, cudaStream_t stream) {
  return add({"reduce_scatter", input, output, count, dtype, op}, comm, stream);
}

ncclResult_t all_reduce(const void* input, void* output, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                        ncclComm_t comm, cudaStream_t stream) {
  return add({"all_reduce", input, output, count, dtype, op}, comm, stream);
}

ncclResult_t broadcast(const void* input, void* output, size_t count, ncclDataType_t dtype, int root,
                       ncclComm_t comm, cudaStream_t stream) {
  return add({"broadcast", input, output, count, dtype, ncclSum, root}, comm, stream);
}

ncclResult_t red_op_create(ncclRedOp_t* op, void* scalar, ncclDataType_t dtype, ncclScalarResidence_t residence,
                           ncclComm_t comm) {
  std::lock_guard lock(active->mutex);
  if (const char* why = why_unusable(comm)) return active->misuse(fmt::format("an operator for one that is {}", why));
  if (residence != ncclScalarHostImmediate) return active->misuse("a factor that is read later");
  *op = static_cast<ncclRedOp_t>(ncclNumOps + comm->operators.size());
  comm->operators.push_back({.dtype = dtype, .scale = scalar_value(scalar, dtype)});
  return ncclSuccess;
}

ncclResult_t red_op_destroy(ncclRedOp_t op, ncclComm_t comm) {
  std::lock_guard lock(active->mutex);
  const auto index = static_cast<size_t>(op - ncclNumOps);
  if (comm == nullptr || index >= comm->operators.size() || !comm->operators[index].is_alive)
    return active->misuse("an operator is destroyed that is not there");
  comm->operators[index].is_alive = false;
  return ncclSuccess;
}

ncclResult_t mem_alloc(void** memory, size_t bytes) {
  State& state = *active;
  std::lock_guard lock(state.mutex);
  if (++state.allocations == state.options.mem_alloc_fails_at) {
    state.last_error = "out of memory";
    return ncclUnhandledCudaError;
  }
  *memory = std::aligned_alloc(NCCL_WIN_REQUIRED_ALIGNMENT, bytes);
  std::memset(*memory, 0x5a, bytes);
  state.blocks[static_cast<char*>(*memory)] = bytes;
  return ncclSuccess;
}

ncclResult_t mem_free(void* memory) {
  State& state = *active;
  std::lock_guard lock(state.mutex);
  if (state.blocks.erase(static_cast<char*>(memory)) == 0) return state.misuse("memory is freed that is not there");
  for (const auto& comm : state.comms)
    if (const auto* window = comm->window_of(memory))
      state.misuse(fmt::format("{} frees the memory of window {}", name_of(comm.get()), window->number));
  std::free(memory);
  return ncclSuccess;
}

ncclResult_t comm_window_register(ncclComm_t comm, void* memory, size_t bytes, ncclWindow_t* made, int flags) {
  State& state = *active;
  std::unique_lock lock(state.mutex);
  if (const char* why = why_unusable(comm)) return state.misuse(fmt::format("a window of one that is {}", why));
  if (group_depth > 0) return state.misuse("a window is registered amid a group of launches");
  const auto block = state.blocks.find(static_cast<char*>(memory));
  if (block == state.blocks.end() || block->second != bytes || bytes % NCCL_WIN_REQUIRED_ALIGNMENT != 0)
    return state.misuse("a window that is not one block of NCCL's memory");
  if (flags != NCCL_WIN_COLL_SYMMETRIC) return state.misuse("a window that is not symmetric");
  *made = nullptr;
  if (!state.options.has_windows && state.options.version >= kOneSidedWindows) return ncclSuccess;
  const int number = static_cast<int>(comm->windows.size()) + 1;
  if (is_at(state.options.register_fails, comm, number)) {
    comm->error = ncclSystemError;
    state.last_error = "a handle could not be exported";
    return comm->blocks ? ncclSystemError : ncclInProgress;
  }
  auto& registration = comm->clique->registrations[number];
  if (registration.joined > 0 && registration.bytes != bytes)
    return state.misuse(fmt::format("window {} has {} bytes on {} and {} on another", number, bytes, name_of(comm),
                                    registration.bytes));
  registration.bytes = bytes;
  ++registration.joined;
  comm->windows.push_back(std::make_unique<ncclWindow_vidmem>(
      ncclWindow_vidmem{.memory = static_cast<char*>(memory), .bytes = bytes, .number = number}));
  comm->registering = made;
  comm->polls_left = state.options.polls;
  state.changed.notify_all();
  if (!comm->blocks) return ncclInProgress;
  if (!state.await(lock, *comm, [comm] { return have_all_registered(*comm); })) return ncclInternalError;
  finish_registering(state, comm);
  return ncclSuccess;
}

ncclResult_t comm_window_deregister(ncclComm_t comm, ncclWindow_t window) {
  State& state = *active;
  std::lock_guard lock(state.mutex);
  if (const char* why = why_unusable(comm)) return state.misuse(fmt::format("a window back to one that is {}", why));
  if (window == nullptr || !window->is_registered) return state.misuse("a window is given back that is not there");
  if (comm->windows_in_use.contains(window->number))
    return state.misuse(fmt::format("{} gives window {} back while it is in use", name_of(comm), window->number));
  window->is_registered = false;
  return ncclSuccess;
}

}  // namespace entry
}  // namespace

NcclSubstitute::NcclSubstitute() : NcclSubstitute(Options()) {}

NcclSubstitute::NcclSubstitute(Options options) : state_(std::make_unique<State>()) {
  if (active != nullptr) throw std::logic_error("there is a substitute for NCCL already");
  state_->options = std::move(options);
  active = state_.get();
  try {
    state_->api = load_nccl_api(find);
  } catch (const CommError&) {
    // Without what everybody needs there is no table.
  }
}

NcclSubstitute::~NcclSubstitute() {
  std::unique_lock lock(state_->mutex);
  active = nullptr;
  state_->has_gone = true;
  state_->changed.notify_all();
  // Calls that nobody waits for any more come back at some time, to what there was.
  const bool is_left = state_->waiting > 0 || std::any_of(state_->comms.begin(), state_->comms.end(),
                                                          [](const auto& comm) { return !comm->graphs.empty(); });
  lock.unlock();
  if (is_left) (void)state_.release();
}

int nccl_test_version() {
  const char* text = std::getenv("FSDP_TEST_NCCL_VERSION");
  return text == nullptr ? NCCL_VERSION_CODE : std::atoi(text);
}

bool NcclSubstitute::has_slots() const { return state_->options.version >= kOneSidedWindows; }

const NcclApi& NcclSubstitute::api() const { return state_->api; }

void* NcclSubstitute::find(const char* name) {
  static const std::map<std::string, void*> functions = {
      {"ncclGetVersion", reinterpret_cast<void*>(entry::get_version)},
      {"ncclGetErrorString", reinterpret_cast<void*>(entry::get_error_string)},
      {"ncclGetLastError", reinterpret_cast<void*>(entry::get_last_error)},
      {"ncclGetUniqueId", reinterpret_cast<void*>(entry::get_unique_id)},
      {"ncclCommInitRankConfig", reinterpret_cast<void*>(entry::comm_init_rank_config)},
      {"ncclCommGetAsyncError", reinterpret_cast<void*>(entry::comm_get_async_error)},
      {"ncclCommFinalize", reinterpret_cast<void*>(entry::comm_finalize)},
      {"ncclCommDestroy", reinterpret_cast<void*>(entry::comm_destroy)},
      {"ncclCommAbort", reinterpret_cast<void*>(entry::comm_abort)},
      {"ncclGroupStart", reinterpret_cast<void*>(entry::group_start)},
      {"ncclGroupEnd", reinterpret_cast<void*>(entry::group_end)},
      {"ncclAllGather", reinterpret_cast<void*>(entry::all_gather)},
      {"ncclReduceScatter", reinterpret_cast<void*>(entry::reduce_scatter)},
      {"ncclAllReduce", reinterpret_cast<void*>(entry::all_reduce)},
      {"ncclBroadcast", reinterpret_cast<void*>(entry::broadcast)},
      {"ncclRedOpCreatePreMulSum", reinterpret_cast<void*>(entry::red_op_create)},
      {"ncclRedOpDestroy", reinterpret_cast<void*>(entry::red_op_destroy)},
      {"ncclMemAlloc", reinterpret_cast<void*>(entry::mem_alloc)},
      {"ncclMemFree", reinterpret_cast<void*>(entry::mem_free)},
      {"ncclCommWindowRegister", reinterpret_cast<void*>(entry::comm_window_register)},
      {"ncclCommWindowDeregister", reinterpret_cast<void*>(entry::comm_window_deregister)},
  };
  if (active != nullptr && active->options.missing_symbol == name) return nullptr;
  const auto found = functions.find(name);
  return found == functions.end() ? nullptr : found->second;
}

std::vector<std::string> NcclSubstitute::misuses() const {
  std::lock_guard lock(state_->mutex);
  auto all = state_->misuses;
  for (const auto& comm : state_->comms)
    // One that a call is still connecting is the call's.
    if (comm->state != ncclComm::State::kGone && !(comm->blocks && comm->state == ncclComm::State::kConnecting))
      all.push_back(name_of(comm.get()) + " still has a communicator");
  if (!state_->blocks.empty()) all.push_back(fmt::format("{} blocks of memory are not freed", state_->blocks.size()));
  return all;
}

NcclSubstitute::Counts NcclSubstitute::counts() const {
  std::lock_guard lock(state_->mutex);
  int64_t bytes = 0;
  for (const auto& [memory, size] : state_->blocks) bytes += static_cast<int64_t>(size);
  return {.communicators = static_cast<int>(state_->comms.size()),
          .launches = state_->launches,
          .collectives = state_->collectives,
          .windows = state_->windows,
          .windowed_gathers = state_->windowed_gathers,
          .windowed_reductions = state_->windowed_reductions,
          .symmetric_kernels = state_->symmetric_kernels,
          .launch_threads = state_->launch_threads,
          .bytes = bytes};
}

std::vector<int> NcclSubstitute::cta_policies(int rank) const {
  std::lock_guard lock(state_->mutex);
  std::vector<int> policies;
  for (const auto& comm : state_->comms)
    if (comm->rank == rank) policies.push_back(comm->cta_policy);
  return policies;
}

}  // namespace fsdp::test
