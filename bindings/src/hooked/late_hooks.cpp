#include "hooked/late_hooks.hpp"

#include "hooked/hooked_extension.hpp"
#include "hooked/hooked_handle.hpp"
#include "root/edit/late_extension.hpp"
#include "root/find_param.hpp"

namespace fsdp::python {

void take_late_hooks(const ShownParams& params) {
  if (!params.find_hooked()) return;
  const auto find = params.find_hooked().object();
  for (const auto& param : params.all()) {
    if (param->sharded().holds_subclass()) continue;
    const auto& entry = param->forms().entries().all().front();
    const auto hooked = find(param->sharded().object(), entry.table.object(), entry.key.object());
    const auto found = hooked.is_none() ? std::nullopt : find_param(param->sharded().local_tensor());
    if (!found) continue;
    auto extension = std::make_shared<HookedExtension>(hooked);
    {
      py::gil_scoped_release no_gil;
      set_extension(*found->group, found->index, std::move(extension));
    }
    param->gather_by_hooks(std::make_unique<HookedHandle>(found->param().unsharded_param(), hooked, param->maker()));
  }
}

}  // namespace fsdp::python
