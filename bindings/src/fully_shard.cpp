#include "fully_shard.hpp"

#include <unordered_map>

#include "api/params/find_param.hpp"
#include "hooked/hooked_handle.hpp"
#include "module/handles.hpp"
#include "options.hpp"
#include "root/configure.hpp"
#include "shown/dtensor_handle.hpp"
#include "shown/shown_registry.hpp"

namespace fsdp::python {

namespace {

using Params = std::unordered_map<const c10::TensorImpl*, std::shared_ptr<ShownParam>>;

/// What a module held before, by what the core saw of it.
std::shared_ptr<Originals> originals_of(const std::vector<PlainEntry>& entries) {
  auto originals = std::make_shared<Originals>();
  for (const auto& entry : entries) originals->try_emplace(entry.seen_as, entry.parameter);
  return originals;
}

/// The placer of a call, and what of it each parameter asks for.
struct CallPlacer {
  explicit CallPlacer(py::object object)
      : object(std::move(object)),
        sharded(this->object.attr("sharded")),
        computes_with_plain(this->object.attr("computes_with_plain").cast<bool>()) {}

  py::object object, sharded;
  bool computes_with_plain;
};

/// What modules compute with instead of the unsharded parameter itself; null: that.
std::unique_ptr<ComputeHandle> handle_of(const FSDPParam& param, const py::object& original, const CallPlacer& placer) {
  if (placer.computes_with_plain) return nullptr;
  const auto& maker = python_side().dtensors;
  const py::object& object = placer.object;
  if (const py::object hooked = object.attr("hooked")(original); !hooked.is_none())
    return std::make_unique<HookedHandle>(param.unsharded_param(), hooked, maker);
  const py::object like = object.attr("computed_like")(original);
  if (like.is_none()) return nullptr;
  return std::make_unique<DTensorHandle>(param.unsharded_param(), like, object.attr("gradient_placements")(original), maker);
}

std::shared_ptr<ShownParam> make_shown(const ParamGroup& group, const FSDPParam& param, const py::object& original,
                                       const CallPlacer& placer) {
  const bool is_cut = group.identity().mesh_info.use == MeshUse::kShard;
  const auto sharded = placer.sharded(plain_view(param.local_tensor()), original,
                                      is_cut ? py::object(py::int_(param.layout().dim())) : py::none(),
                                      c10::IntArrayRef(param.spec.sizes()), c10::IntArrayRef(param.spec.strides()),
                                      param.requires_grad());
  auto handle = handle_of(param, original, placer);
  const auto unsharded = handle ? py::cast(param.unsharded_param()) : original;
  return ShownParam::make(param.local_tensor(), sharded, unsharded, std::move(handle), python_side().dtensors);
}

/// The parameters of a group as Python is to show them, by unsharded parameter. Those that came from another group keep
/// what shows them.
void show_group(const ParamGroup& group, const Originals& originals, const CallPlacer& placer, Params& params) {
  for (const auto& param : group.params()) {
    auto shown = shown_registry().find(param.local_tensor());
    const auto* handle = param.unsharded_param().unsafeGetTensorImpl();
    if (!shown) shown = make_shown(group, param, originals.at(handle), placer);
    params.emplace(handle, std::move(shown));
  }
}

/// Every entry of the trees that holds one of the unsharded parameters shows the DTensor from now on.
void take_places(const std::vector<PlainEntry>& entries, const Params& params) {
  for (const auto& entry : entries)
    if (const auto found = params.find(entry.seen_as); found != params.end()) found->second->add_place(entry.place);
}

}  // namespace

PythonSide& python_side() {
  static auto* side = new PythonSide;
  return *side;
}

std::shared_ptr<ShardedModule> shard(const py::list& modules, const py::object& placer, const py::dict& arguments) {
  const auto& side = python_side();
  Mirrors mirrors(side.mirrors, placer.attr("is_left_out"), side.local_tensors, side.stand_in);
  std::vector<std::shared_ptr<Mirror>> units;
  std::vector<std::shared_ptr<torch::nn::Module>> raw;
  for (const auto& module : modules) {
    units.push_back(mirrors.follow(module));
    raw.push_back(units.back());
  }
  const auto& entries = mirrors.plain_entries();
  const auto originals = originals_of(entries);
  auto call = shard_call(placer, arguments, mirrors, originals);
  auto controls = [&] {
    py::gil_scoped_release no_gil;
    return fsdp::fully_shard(raw, call.options);
  }();
  for (const auto& group : handles::state(controls).live_groups())
    configure(*group, [&](GroupOptions& options) { options.reduce.in_own_dtype = call.reduces_in_own_dtype; });
  std::vector<bool> is_exempt;
  for (const auto& unit : raw) is_exempt.push_back(call.options.mp_policy.is_exempt && call.options.mp_policy.is_exempt(*unit));
  Params params;
  const CallPlacer shows(placer);
  for (const auto& group : handles::state(controls).live_groups()) show_group(*group, *originals, shows, params);
  take_places(entries, params);
  originals->clear();
  auto sharded = std::make_shared<ShardedModule>(
      std::move(controls), std::move(units),
      BoundaryCasts{call.input_dtype, call.output_dtype, std::move(is_exempt), std::move(call.apply_to_tensors)});
  sharded->attach();
  // Ties may have come here from groups below, where the others have moved together.
  sharded->find_params();
  handles::state(sharded->controls()).visit([](ModuleState& below) {
    if (const auto shown = ShardedModule::of(below)) shown->find_params();
  });
  return sharded;
}

}  // namespace fsdp::python
