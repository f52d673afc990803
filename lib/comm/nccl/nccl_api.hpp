// Only in builds with CUDA: nccl.h comes with the torch wheel.
#pragma once

#include <nccl.h>

#include <functional>
#include <string>

namespace fsdp {

/// All of NCCL that this library calls: nothing else names a function of it, so tests put their own in its place.
/// Those of the last part are not in every NCCL that the wheels of torch load; null where they are missing.
struct NcclApi {
  decltype(&::ncclGetVersion) get_version = nullptr;
  decltype(&::ncclGetErrorString) get_error_string = nullptr;
  decltype(&::ncclGetLastError) get_last_error = nullptr;

  decltype(&::ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&::ncclCommInitRankConfig) comm_init_rank_config = nullptr;
  decltype(&::ncclCommGetAsyncError) comm_get_async_error = nullptr;
  decltype(&::ncclCommFinalize) comm_finalize = nullptr;
  decltype(&::ncclCommDestroy) comm_destroy = nullptr;
  decltype(&::ncclCommAbort) comm_abort = nullptr;

  decltype(&::ncclGroupStart) group_start = nullptr;
  decltype(&::ncclGroupEnd) group_end = nullptr;
  decltype(&::ncclAllGather) all_gather = nullptr;
  decltype(&::ncclReduceScatter) reduce_scatter = nullptr;
  decltype(&::ncclAllReduce) all_reduce = nullptr;
  decltype(&::ncclBroadcast) broadcast = nullptr;
  decltype(&::ncclRedOpCreatePreMulSum) red_op_create_pre_mul_sum = nullptr;
  decltype(&::ncclRedOpDestroy) red_op_destroy = nullptr;

  decltype(&::ncclMemAlloc) mem_alloc = nullptr;
  decltype(&::ncclMemFree) mem_free = nullptr;
  decltype(&::ncclCommWindowRegister) comm_window_register = nullptr;      // from 2.27 on
  decltype(&::ncclCommWindowDeregister) comm_window_deregister = nullptr;  // from 2.27 on

  bool has_memory() const { return mem_alloc != nullptr && mem_free != nullptr; }
  bool has_windows() const { return comm_window_register != nullptr && comm_window_deregister != nullptr; }

  /// "2.30.7", of the library.
  std::string version() const;
  /// 23007, of the library; 0: it does not say.
  int version_code() const;

  // Where versions differ in what they do with windows. Before these NCCL registers a window and goes on as if there were none.
  /// A window under what a gather writes, or a reduction reads, is enough: the other side may be any memory.
  bool takes_one_sided_windows() const { return version_code() >= 22900; }
  /// Symmetric kernels know averages beside sums; none knows factors.
  bool averages_in_symmetric_kernels() const { return version_code() >= 23000; }
  /// What NCCL says of `result`, with its own account of the last error: "NCCL 2.30.7: remote process exited or
  /// there was a network error (...)". `comm` may be null.
  std::string describe(ncclResult_t result, ncclComm_t comm) const;
};

/// The address of a function by its name; null: there is none.
using SymbolSource = std::function<void*(const char* name)>;

/// Throws CommError naming the function that is missing and the version, unless it is one of the last part.
NcclApi load_nccl_api(const SymbolSource& find);

/// The NCCL that LibTorch calls too, one that LD_PRELOAD put in its place included. Throws as above.
const NcclApi& nccl_api();

/// NCCL's policy for communicators that gather. Throws UsageError where copy engines are asked for that this NCCL does not use
/// for one-sided windows.
int gathers_cta_policy(const NcclApi& api, bool use_copy_engine_all_gather);

/// Asks NCCL to launch the kernels of all communicators of a device in the order in which the host launches them (see Note
/// [Two NCCL communicators]), unless the user has said what NCCL_LAUNCH_ORDER_IMPLICIT is to be. NCCL reads it once, at the
/// process's first launch: what another library launched before stays as it was.
void order_nccl_launches(const NcclApi& api);

}  // namespace fsdp
