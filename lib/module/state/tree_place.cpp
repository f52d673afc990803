#include "module/state/tree_place.hpp"

#include "module/module_path.hpp"

namespace fsdp {

const std::string& TreePlace::description() const {
  static const std::string root = "root";
  return name_.empty() ? root : name_;
}

void TreePlace::set_path(const torch::nn::Module& module, const std::string& path) {
  for (auto& unit : units_)
    if (unit.module == &module) unit.path = path;
}

void TreePlace::set_name_below(const std::string& above) { name_ = join_path(above, units_.front().path); }

std::string TreePlace::full_name(const OwnedParam& param, const std::string& above) const {
  return join_path(join_path(above, units_[param.unit].path), param.name);
}

}  // namespace fsdp
