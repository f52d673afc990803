#include "module/state/tree_position.hpp"

#include "module/module_path.hpp"

namespace fsdp {

const std::string& TreePosition::description() const {
  static const std::string root = "root";
  return name_.empty() ? root : name_;
}

void TreePosition::set_path(const torch::nn::Module& module, const std::string& path) {
  for (auto& unit : units_)
    if (unit.module == &module) unit.path = path;
}

void TreePosition::set_name_below(const std::string& above) { name_ = join_path(above, units_.front().path); }

std::string TreePosition::full_name(const OwnedParam& param, const std::string& above) const {
  return join_path(join_path(above, units_[param.unit].path), param.name);
}

}  // namespace fsdp
