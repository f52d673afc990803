// Parameters and buffers on other devices than the mesh's.
#include <catch2/catch.hpp>

#include "base/require.hpp"
#include "late_ranks.hpp"
#include "support/models.hpp"

namespace fsdp::test {
namespace {

const std::vector<std::string> kNoErrors = {"", ""};

/// A parameter on each of these devices, and a buffer on the last.
struct Spread : torch::nn::Module {
  explicit Spread(const std::vector<c10::Device>& devices) {
    for (size_t i = 0; i < devices.size(); ++i)
      register_parameter(fmt::format("p{}", i), torch::ones({4, 2}, at::TensorOptions(devices[i])));
    register_buffer("table", torch::ones({3}, at::TensorOptions(devices.back())));
  }
  std::vector<c10::Device> devices() const {
    std::vector<c10::Device> found;
    for (const auto& parameter : parameters()) found.push_back(parameter.device());
    found.push_back(buffers()[0].device());
    return found;
  }
};

DeviceMesh mesh_on(const LateRank& rank, c10::DeviceType type) {
  return init_device_mesh(rank.world, {rank.size()}, {"shard"}, {.device_type = type});
}

/// fully_shard throws a message with all of `parts`, and the module is what it was.
void expect_refused(Spread& module, const DeviceMesh& mesh, const std::vector<std::string>& parts) {
  const auto before = module.parameters();
  const auto devices = module.devices();
  std::string message = "nothing was thrown";
  try {
    fully_shard(module, {.mesh = mesh});
  } catch (const UsageError& error) {
    message = message_of(error);
  }
  for (const auto& part : parts) require(message.find(part) != std::string::npos, "no '{}' in: {}", part, message);
  require(!find_fsdp_module(module), "a state was left behind");
  require(module.devices() == devices, "something was moved");
  const auto after = module.parameters();
  for (size_t i = 0; i < before.size(); ++i)
    require(after[i].is_same(before[i]) && !is_fsdp_parameter(after[i]), "parameter {} is another one", i);
}

}  // namespace

TEST_CASE("a parameter on an accelerator is refused by a mesh of CPUs, which names both", "[late][parameters]") {
  CHECK(errors_on_late({}, [](LateRank& rank) {
          const auto here = rank.device();
          Spread all({here, here}), one({at::kCPU, here});
          expect_refused(all, mesh_on(rank, at::kCPU),
                         {"p0", "is on " + here.str(), "the mesh is on cpu", "move the module"});
          expect_refused(one, mesh_on(rank, at::kCPU), {"p1", "is on " + here.str(), "the mesh is on cpu"});
        }) == kNoErrors);
}

TEST_CASE("a parameter on another accelerator than the rank's is refused, and so are several accelerators",
          "[late][parameters]") {
  CHECK(errors_on_late({}, [](LateRank& rank) {
          const auto here = rank.device(), other = late(rank.index() + 2);
          const std::string both = fmt::format("is on {}, but the mesh is on {}", other.str(), here.str());
          Spread elsewhere({other}), two({here, other});
          expect_refused(elsewhere, mesh_on(rank, kLate), {"p0", both});
          expect_refused(two, mesh_on(rank, kLate), {"p1", both});
        }) == kNoErrors);
}

TEST_CASE("parameters and buffers on the CPU move to the mesh's accelerator, with their gradients",
          "[late][parameters]") {
  CHECK(errors_on_late({}, [](LateRank& rank) {
          const auto here = rank.device();
          Spread module({at::kCPU, here, at::kCPU});
          const auto handle = module.parameters()[0];
          handle.mutable_grad() = torch::arange(8.).view({4, 2});
          fully_shard(module, {.mesh = mesh_on(rank, kLate)});
          require(module.devices() == std::vector<c10::Device>(4, here), "not all are here");
          require(handle.device() == here, "the member is on {}", handle.device().str());
          for (const auto& parameter : module.parameters())
            require(full_tensor(parameter).cpu().equal(torch::ones({4, 2})), "other values");
          const auto gradient = module.parameters()[0].grad();
          require(gradient.device() == here, "its gradient is on {}", gradient.device().str());
          require(to_local(gradient).cpu().equal(rows_of(torch::arange(8.).view({4, 2}), rank.index(), 2)), "another gradient");
          require(gradient.cpu().equal(torch::arange(8.).view({4, 2})), "another whole gradient");
        }) == kNoErrors);
}

TEST_CASE("the whole of an offloaded parameter, and of its gradient, is on the host as the parameter is", "[late][parameters]") {
  CHECK(errors_on_late({}, [](LateRank& rank) {
          for (const auto layout : {ParamLayout::kPerParameter, ParamLayout::kFlat}) {
            Spread module({rank.device()});
            fully_shard(module, {.mesh = mesh_on(rank, kLate), .offload_policy = CPUOffloadPolicy{}, .layout = layout});
            const auto parameter = module.parameters()[0];
            require(parameter.device() == at::kCPU, "not offloaded");
            const auto whole = full_tensor(parameter);
            require(whole.device() == at::kCPU, "the function's is on {}", whole.device().str());
            require(whole.equal(torch::ones({4, 2})), "other values");
            (parameter * 2).sum().backward();
            const auto gradient = full_grad(parameter);
            require(gradient.defined() && gradient.device() == at::kCPU, "the gradient is on {}", gradient.device().str());
            require(gradient.equal(torch::full({4, 2}, 2.)), "another gradient");
            if (layout == ParamLayout::kFlat) continue;
            const auto by_method = dtensor_of(parameter).full_tensor();
            require(by_method.device() == at::kCPU, "the method's is on {}", by_method.device().str());
            require(by_method.equal(whole), "the method has other values");
          }
        }) == kNoErrors);
}

TEST_CASE("meta parameters stay meta on an accelerator's mesh, and beside others are refused", "[late][parameters]") {
  CHECK(errors_on_late({}, [](LateRank& rank) {
          Spread all({at::kMeta, at::kMeta}), one({rank.device(), at::kMeta});
          expect_refused(one, mesh_on(rank, kLate),
                         {"p1", "is on meta", "'p0' of the same group is on " + rank.device().str()});
          fully_shard(all, {.mesh = mesh_on(rank, kLate)});
          require(all.devices() == std::vector<c10::Device>(3, at::kMeta), "something has left the meta device");
        }) == kNoErrors);
}

}  // namespace fsdp::test
