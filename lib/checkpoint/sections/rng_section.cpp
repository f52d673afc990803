#include "checkpoint/sections/rng_section.hpp"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <mutex>
#include <vector>

#include "base/log.hpp"

namespace fsdp {

namespace {

std::vector<std::pair<std::string, at::Generator>> generators() {
  std::vector<std::pair<std::string, at::Generator>> all{{"cpu", at::globalContext().defaultGenerator(at::kCPU)}};
  if (at::hasCUDA())
    all.emplace_back("cuda", at::globalContext().defaultGenerator(c10::impl::VirtualGuardImpl(at::kCUDA).getDevice()));
  return all;
}

std::string name_of(int rank, const std::string& generator) { return fmt::format("rank{}.{}", rank, generator); }

}  // namespace

CheckpointSection rng_section(int rank, int world_size) {
  CheckpointSection section{"rng", {}};
  for (auto& [name, generator] : generators()) {
    at::Tensor state;
    {
      std::lock_guard lock(generator.mutex());
      state = generator.get_state().cpu();
    }
    const int64_t bytes = state.numel();
    for (int other = 0; other < world_size; ++other) {
      CheckpointTensor tensor{.name = name_of(other, name), .local = at::empty({0}, at::kByte), .sizes = {bytes}};
      tensor.is_sharded = true;
      if (other == rank) {
        tensor.local = state.clone();
        tensor.ranges = {{0, bytes}};
      }
      section.tensors.push_back(std::move(tensor));
    }
  }
  return section;
}

bool can_restore_rng(const CheckpointReader& reader, const CheckpointSection& section, int world_size) {
  if (reader.world_size() != world_size || !reader.has_section(section.name)) return false;
  const bool fits = reader.compare(section).empty();
  if (!fits) warn_once("load_checkpoint: the saved states do not fit this process's random generators, which keep their own");
  return fits;
}

void restore_rng(const CheckpointSection& section, int rank) {
  for (auto& [name, generator] : generators())
    for (const auto& tensor : section.tensors) {
      if (tensor.name != name_of(rank, name)) continue;
      std::lock_guard lock(generator.mutex());
      generator.set_state(tensor.local);
    }
}

}  // namespace fsdp
