#include "group/symm_mem_pool.hpp"

namespace fsdp {

int64_t SymmMemPool::bytes() const {
  int64_t bytes = 0;
  for (const auto& slot : slots_)
    if (slot.buffer) bytes += slot.bytes;
  return bytes;
}

std::shared_ptr<SymmMemBuffer> SymmMemPool::buffer(size_t slot) {
  auto& [bytes, was_made, buffer] = slots_[slot];
  if (!std::exchange(was_made, true)) buffer = make_slot(*comm_, use_, bytes);
  return buffer;
}

}  // namespace fsdp
