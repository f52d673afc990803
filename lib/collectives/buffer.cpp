#include "collectives/buffer.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <fmt/ranges.h>

#include <utility>

#include "base/plain_values.hpp"
#include "base/require.hpp"

#include "collectives/quarantine.hpp"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace fsdp {

namespace {

constexpr size_t kHugePage = 2 << 20;

void ask_for_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#ifdef __linux__
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (address + bytes) / kHugePage * kHugePage;
  // A hint: a kernel that knows nothing of it changes nothing.
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

/// On CPU without the dispatcher, which costs as much as the allocator.
at::Tensor allocate(int64_t numel, const at::TensorOptions& options) {
  if (options.device().is_cpu() && !options.pinned_memory())
    return at::Tensor(at::detail::empty_cpu({numel}, c10::typeMetaToScalarType(options.dtype())));
  return at::empty({numel}, options);
}

thread_local int64_t* counted_bytes = nullptr;

void count(size_t bytes) {
  if (counted_bytes != nullptr) *counted_bytes += static_cast<int64_t>(bytes);
}

}  // namespace

CountedBuffers::CountedBuffers(int64_t& bytes) : outer_(std::exchange(counted_bytes, &bytes)) {}

CountedBuffers::~CountedBuffers() { counted_bytes = outer_; }

at::Tensor make_buffer(int64_t numel, const at::TensorOptions& options) {
  auto buffer = allocate(numel, options);
  const auto bytes = buffer.storage().nbytes();
  count(bytes);
  if (bytes >= kHugePage && buffer.is_cpu()) ask_for_huge_pages(buffer.data_ptr(), bytes);
  if (const auto* guarded = GuardedBuffers::current()) [[unlikely]]
    return guarded->protect(std::move(buffer));
  return buffer;
}

at::Tensor make_buffer(int64_t numel, const at::TensorOptions& options, Comm* custom,
                       std::string_view subject) {
  if (custom == nullptr) return make_buffer(numel, options);
  auto buffer = custom->allocate(numel, options);
  require(buffer.defined(), "{}: allocate() of its custom collective returned no tensor; expected {} elements", subject, numel);
  require(is_plain(buffer), "{}: allocate() of its custom collective returned {}; expected a plain tensor of {} elements",
          subject, what_it_is(buffer), numel);
  require(buffer.dim() == 1 && buffer.numel() == numel && buffer.is_contiguous() &&
              buffer.dtype() == options.dtype() && buffer.device().type() == options.device().type(),
          "{}: allocate() of its custom collective returned a tensor of sizes {}, {} on {}; expected one dimension of {} "
          "elements, {} on {}, contiguous",
          subject, fmt::join(buffer.sizes(), "x"), c10::toString(buffer.scalar_type()), buffer.device().str(), numel,
          c10::toString(c10::typeMetaToScalarType(options.dtype())), options.device().str());
  count(buffer.nbytes());
  return buffer;
}

}  // namespace fsdp
