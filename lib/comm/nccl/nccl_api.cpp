#include "comm/nccl/nccl_api.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>

#include "base/require.hpp"
#include "fsdp/error.hpp"

namespace fsdp {
namespace {

template <class Function>
void take(Function& entry, const SymbolSource& find, const char* name) {
  entry = reinterpret_cast<Function>(find(name));
}

template <class Function>
void need(Function& entry, const SymbolSource& find, const char* name, const NcclApi& known) {
  take(entry, find, name);
  if (entry != nullptr) return;
  throw CommError(fmt::format(
      "backend nccl: the NCCL that LibTorch has loaded ({}) has no function {}; install the nvidia-nccl wheel that "
      "torch asks for, or use backend c10d_nccl",
      known.get_version != nullptr ? "version " + known.version() : "of unknown version", name));
}

/// Finds a function in the order in which the loader itself would resolve a call of libtorch_cuda's: in what stands in front of
/// all libraries, then in what that library needs (or contains).
void* find_beside_libtorch(const char* name) {
  if (void* found = ::dlsym(RTLD_DEFAULT, name)) return found;
  static void* const libtorch = ::dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  return libtorch != nullptr ? ::dlsym(libtorch, name) : nullptr;
}

}  // namespace

int NcclApi::version_code() const {
  int code = 0;
  return get_version(&code) == ncclSuccess ? code : 0;
}

std::string NcclApi::version() const {
  const int code = version_code();
  if (code == 0) return "of unknown version";
  return fmt::format("{}.{}.{}", code / 10000, code % 10000 / 100, code % 100);
}

std::string NcclApi::describe(ncclResult_t result, ncclComm_t comm) const {
  const char* last = get_last_error(comm);
  const std::string account = last == nullptr || *last == '\0' ? "" : fmt::format(" ({})", last);
  return fmt::format("NCCL {}: {}{}", version(), get_error_string(result), account);
}

NcclApi load_nccl_api(const SymbolSource& find) {
  NcclApi api;
  need(api.get_version, find, "ncclGetVersion", api);
  need(api.get_error_string, find, "ncclGetErrorString", api);
  need(api.get_last_error, find, "ncclGetLastError", api);
  need(api.get_unique_id, find, "ncclGetUniqueId", api);
  need(api.comm_init_rank_config, find, "ncclCommInitRankConfig", api);
  need(api.comm_get_async_error, find, "ncclCommGetAsyncError", api);
  need(api.comm_finalize, find, "ncclCommFinalize", api);
  need(api.comm_destroy, find, "ncclCommDestroy", api);
  need(api.comm_abort, find, "ncclCommAbort", api);
  need(api.group_start, find, "ncclGroupStart", api);
  need(api.group_end, find, "ncclGroupEnd", api);
  need(api.all_gather, find, "ncclAllGather", api);
  need(api.reduce_scatter, find, "ncclReduceScatter", api);
  need(api.all_reduce, find, "ncclAllReduce", api);
  need(api.broadcast, find, "ncclBroadcast", api);
  need(api.red_op_create_pre_mul_sum, find, "ncclRedOpCreatePreMulSum", api);
  need(api.red_op_destroy, find, "ncclRedOpDestroy", api);
  take(api.mem_alloc, find, "ncclMemAlloc");
  take(api.mem_free, find, "ncclMemFree");
  take(api.comm_window_register, find, "ncclCommWindowRegister");
  take(api.comm_window_deregister, find, "ncclCommWindowDeregister");
  return api;
}

const NcclApi& nccl_api() {
  static const NcclApi api = load_nccl_api(find_beside_libtorch);
  return api;
}

int gathers_cta_policy(const NcclApi& api, bool use_copy_engine_all_gather) {
  if (!use_copy_engine_all_gather) return NCCL_CONFIG_UNDEF_INT;
#ifdef NCCL_CTA_POLICY_ZERO
  // 2.28 has them too, for gathers whose input lies in a window as well.
  require(api.takes_one_sided_windows() && api.has_memory() && api.has_windows(),
          "backend nccl: all-gathers by copy engines need NCCL 2.29 or later, found {}; set use_copy_engine_all_gather to "
          "false, or install a newer nvidia-nccl wheel",
          api.version());
  return NCCL_CTA_POLICY_ZERO;
#else
  throw UsageError(
      "backend nccl: this libfsdp was built with a nccl.h that knows no all-gathers by copy engines; build it with "
      "that of NCCL 2.29 or later, or set use_copy_engine_all_gather to false");
#endif
}

void order_nccl_launches(const NcclApi& api) {
  constexpr int kFirstVersion = 22600;
  if (api.version_code() >= kFirstVersion) ::setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", /*overwrite=*/0);
}

}  // namespace fsdp
