// What the functions of the substitute share.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "nccl_substitute.hpp"
#include "nccl_substitute_math.hpp"

namespace fsdp::test {

/// One launch of all ranks.
struct Meeting {
  std::map<int, std::vector<NcclCall>> by_rank;
  bool is_done = false;
  bool has_failed = false;
};

/// The ranks that were given one id.
struct Clique {
  int size = 0;
  int joined = 0;
  std::map<std::pair<int, int>, Meeting> meetings = {};  // by the launch's number, from 1 on, and its run, from 0 on
  struct Registration {
    size_t bytes = 0;
    int joined = 0;
  };
  std::map<int, Registration> registrations = {};  // by the window's number, from 1 on
};

struct Operator {
  ncclDataType_t dtype = ncclFloat32;
  double scale = 1;
  bool is_alive = true;
};

}  // namespace fsdp::test

// NCCL's opaque types.
struct ncclWindow_vidmem {
  char* memory = nullptr;
  size_t bytes = 0;
  int number = 0;  // the same on all ranks
  bool is_registered = false;
  bool contains(const void* other) const { return other >= memory && other < memory + bytes; }
};

struct ncclComm {
  std::shared_ptr<fsdp::test::Clique> clique;
  int rank = 0;
  enum class State { kConnecting, kReady, kFinalizing, kGone } state = State::kConnecting;
  ncclResult_t error = ncclSuccess;
  bool is_aborted = false;
  int polls_left = 0;
  int launches = 0;
  int queued = 0;   // launches on streams that have not ended
  int running = 0;  // of these, those that their stream has come to
  std::vector<std::function<void()>> held = {};  // what is in progress still
  std::vector<fsdp::test::Operator> operators = {};
  const void* owner = nullptr;  // the substitute's state
  bool blocks = true;
  // Graphs that have captured launches of it.
  std::vector<std::weak_ptr<const void>> graphs = {};
  int cta_policy = 0;
  std::vector<std::unique_ptr<ncclWindow_vidmem>> windows = {};
  ncclWindow_t* registering = nullptr;     // where the last of them is to be told, once all ranks have come
  std::multiset<int> windows_in_use = {};  // by launches that have not ended

  bool has_graphs() const {
    return std::any_of(graphs.begin(), graphs.end(), [](const auto& graph) { return !graph.expired(); });
  }
  ncclWindow_vidmem* window_of(const void* memory) const {
    for (const auto& window : windows)
      if (window->is_registered && window->contains(memory)) return window.get();
    return nullptr;
  }
};

namespace fsdp::test {

struct NcclSubstitute::State {
  Options options;
  NcclApi api;
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::unique_ptr<ncclComm>> comms;  // those that are gone too, so that their use is noticed
  std::map<std::string, std::shared_ptr<Clique>> cliques;
  std::vector<std::string> misuses;
  std::string last_error;
  int ids = 0, launches = 0, collectives = 0;
  int allocations = 0, windows = 0, windowed_gathers = 0, windowed_reductions = 0, symmetric_kernels = 0;
  int launch_threads = 0;
  int waiting = 0;       // calls that wait for other ranks
  bool has_gone = false;  // the substitute: they fail now
  std::map<char*, size_t> blocks;  // of ncclMemAlloc, alive

  /// As a call of NCCL's waits: until it is so, or the communicator has been aborted. False: it is not so.
  template <class Condition>
  bool await(std::unique_lock<std::mutex>& lock, const ncclComm& comm, const Condition& is_so) {
    ++waiting;
    // Graphs and devices tell nobody.
    while (!is_so() && !comm.is_aborted && !has_gone) changed.wait_for(lock, std::chrono::milliseconds(1));
    --waiting;
    changed.notify_all();
    return is_so() && !has_gone;
  }

  ncclResult_t misuse(const std::string& what) {
    misuses.push_back(what);
    last_error = what;
    return ncclInvalidUsage;
  }
};

}  // namespace fsdp::test
