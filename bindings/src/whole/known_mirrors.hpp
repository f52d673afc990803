#pragma once

#include <memory>
#include <vector>

#include "mirror.hpp"
#include "shown/shown_param.hpp"

namespace fsdp::python {

/// The mirror that fully_shard has made of a Python module, or null.
std::shared_ptr<Mirror> known_mirror(const py::handle& module);

/// The tensor of a mirror's table of parameters. Undefined: there is none.
at::Tensor tensor_at(torch::nn::Module& mirror, size_t slot);

/// What the core knows of a tree of Python modules: the outermost mirrors that fully_shard has made of modules in it, which
/// hold those below them. Modules around them, and modules that came later, have none. recurses: false: that of the module
/// itself.
std::vector<std::shared_ptr<Mirror>> known_mirrors(const py::handle& module, bool recurses);

/// The sharded parameters that they hold, each once.
std::vector<std::shared_ptr<ShownParam>> params_below(const std::vector<std::shared_ptr<Mirror>>& mirrors);

}  // namespace fsdp::python
