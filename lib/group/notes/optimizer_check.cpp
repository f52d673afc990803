#include "group/notes/optimizer_check.hpp"

#include "base/log.hpp"

namespace fsdp {

void OptimizerCheck::note_reduction(const std::string& param, int limit) {
  if (was_written_ || reductions_ >= limit) return;
  if (++reductions_ == limit)
    warn_once(fmt::format(
        "'{}': gradients were reduced in {} backwards, but no optimizer has written the parameters. One "
        "that was built before fully_shard holds the wrong tensors; build it afterwards, or call "
        "fsdp::adopt(optimizer)",
        param, limit));
}

}  // namespace fsdp
