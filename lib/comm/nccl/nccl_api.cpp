#include "comm/nccl/nccl_api.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

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

/// In the order in which the loader itself would resolve a call of libtorch_cuda's: what stands in front of all
/// libraries, then what that library needs (or contains).
void* find_beside_libtorch(const char* name) {
  if (void* found = ::dlsym(RTLD_DEFAULT, name)) return found;
  static void* const libtorch = ::dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  return libtorch != nullptr ? ::dlsym(libtorch, name) : nullptr;
}

}  // namespace

std::string NcclApi::version() const {
  int code = 0;
  if (get_version(&code) != ncclSuccess) return "of unknown version";
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

}  // namespace fsdp
