#pragma once

#include "mirror.hpp"

namespace fsdp::python {

/// Throws StateError if users have put modules or parameters in the places of sharded ones since `root`, the mirror of a root
/// module, was last followed, and these have parameters that need a gradient and nobody has sharded: it would be this rank's
/// alone. Warns once of those in places of their own. Nothing where the tree is what it was.
void check_added_modules(const Mirror& root);

}  // namespace fsdp::python
