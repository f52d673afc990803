#pragma once

#include <functional>
#include <memory>

#include "fsdp/communicator.hpp"

namespace fsdp {

/// What lives as long as the process's default world, made at the first call: the same on all ranks
/// at all times, so that whether it has to be made (a collective call) never differs between them.
/// Makes the default world if there is none.
std::shared_ptr<const void> with_default_world(
    const std::function<std::shared_ptr<const void>(const std::shared_ptr<Communicator>&)>& make);

}  // namespace fsdp
