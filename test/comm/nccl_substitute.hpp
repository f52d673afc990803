#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/nccl/nccl_api.hpp"

namespace fsdp::test {

/// Which NCCL tests stand on: FSDP_TEST_NCCL_VERSION, such as 22809; without it that of nccl.h.
int nccl_test_version();

/// NCCL's functions for ranks that are threads of this process: they move CPU memory, on HostStreams. Nothing of a
/// group runs before its end, and all of it is one launch; a launch begins when its stream is there, and is done when
/// it has begun on all ranks. Communicators block in their calls or not, as they ask for; those that do not, as if each
/// group of launches had a thread of NCCL's own.
///
/// Windows are registered by all ranks together, memory of ncclMemAlloc is the host's. A communicator ends when no graph has
/// anything of it, by an abort too.
///
/// What differs by version, as NCCL's sources have it:
///   2.27, 2.28  a window counts where a collective's input and output both lie in one. Where devices cannot map each
///               other's memory, or NCCL_WIN_ENABLE=0, registering gives a handle all the same.
///   2.29        one window is enough: under a gather's output, a reduction's input. Without such devices no handle.
///   2.30        symmetric kernels average. Before, they know sums alone; factors never, and no float64.
///
/// How it is called is checked: see `misuses`. One at a time, as functions know no object.
class NcclSubstitute {
 public:
  /// A rank's `launch`-th launch on a communicator, from 1 on.
  struct Place {
    int rank = 0;
    int launch = 1;
  };
  struct Options {
    /// Above 0: communicators do not block, as NCCL_COMM_BLOCKING=0 has it, whatever they ask for; so often what could be done
    /// is "in progress" first.
    int polls = 0;
    std::optional<int> init_fails_on = {};
    /// NCCL finds an error there, and the collective never ends.
    std::optional<Place> async_error = {};
    /// The call that launches comes back when the communicator is aborted, and not before.
    std::optional<Place> blocks = {};
    std::string missing_symbol = {};
    int version = nccl_test_version();
    /// Of all ranks' calls of ncclMemAlloc, from 1 on.
    std::optional<int> mem_alloc_fails_at = {};
    /// False: as on devices that cannot map each other's memory, or under NCCL_WIN_ENABLE=0.
    bool has_windows = true;
    /// NCCL finds an error when that rank registers its n-th window ("launch").
    std::optional<Place> register_fails = {};
  };

  NcclSubstitute();
  explicit NcclSubstitute(Options options);
  ~NcclSubstitute();
  NcclSubstitute(const NcclSubstitute&) = delete;
  NcclSubstitute& operator=(const NcclSubstitute&) = delete;

  const NcclApi& api() const;
  /// By NCCL's names, as the loader would find them; null: `missing_symbol`, or one that is not there.
  static void* find(const char* name);

  /// What NCCL would not have forgiven: calls on a communicator that is gone or busy, groups left open, ranks whose
  /// launches differ (also in the window, or the place in it, that each gathers into or reduces from), operators used when they were
  /// destroyed, windows given back or memory freed while they are in use. Those alive now, communicators, operators,
  /// windows or memory, are leaks.
  std::vector<std::string> misuses() const;
  /// What all ranks have made so far: communicators, launches, and collectives in them.
  struct Counts {
    int communicators = 0, launches = 0, collectives = 0;
    int windows = 0;                        ///< registered
    int windowed_gathers = 0;               ///< collectives whose outputs lie in one
    int windowed_reductions = 0;            ///< reduce-scatters whose inputs lie in one
    int symmetric_kernels = 0;              ///< collectives that NCCL would run by one, were NVLink there
    int launch_threads = 0;                 ///< that NCCL would have started for groups of launches
    int64_t bytes = 0;                      ///< of memory that is allocated now
  };
  Counts counts() const;
  /// Our slots are windows on one side: from 2.29 on they are there.
  bool has_slots() const;
  /// `count` where they are, else 0.
  int64_t slots(int64_t count) const { return has_slots() ? count : 0; }
  /// Of every communicator, as they were made; of those on one rank.
  std::vector<int> cta_policies(int rank) const;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace fsdp::test
