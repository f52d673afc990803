#include "fsdp/checkpoint.hpp"

#include <optional>

#include "checkpoint/plan/rank_group.hpp"
#include "checkpoint/sections/model_section.hpp"
#include "checkpoint/sections/optimizer_section.hpp"
#include "checkpoint/sections/rng_section.hpp"
#include "checkpoint/sections/training_parts.hpp"

namespace fsdp {

namespace {

constexpr auto kExtraFile = "extra.json";
constexpr auto kSaveCheckpoint = "save_checkpoint", kLoadCheckpoint = "load_checkpoint";

OptimizerLoad::SavedSection saved_state(const CheckpointReader& reader) {
  OptimizerLoad::SavedSection saved{.document = reader.document(kOptimizerFile), .tensors = {}};
  for (auto& tensor : reader.tensors("optimizer")) saved.tensors.emplace(tensor.name, std::move(tensor));
  return saved;
}

}  // namespace

CheckpointParts training_parts(const Checkpoint& checkpoint, const RankGroup& ranks, const SaveCheckpointOptions& options) {
  require_not_shown(checkpoint.model.get(), kSaveCheckpoint);
  const auto states = named_states(checkpoint.model.get());
  CheckpointParts parts;
  parts.sections.push_back(model_section(states, options.dtype));
  if (auto* optimizer = checkpoint.optimizer.get()) {
    const auto params = optimizer_params(states, *optimizer, kSaveCheckpoint);
    parts.documents[kOptimizerFile] = optimizer_document(params, *optimizer);
    parts.sections.push_back(optimizer_section(params, *optimizer));
  }
  if (checkpoint.rng_state) parts.sections.push_back(rng_section(ranks.rank(), ranks.size()));
  if (!checkpoint.extra.empty()) parts.documents[kExtraFile] = checkpoint.extra;
  return parts;
}

void save_checkpoint(const std::string& path, const Checkpoint& checkpoint, const SaveCheckpointOptions& options) {
  const RankGroup ranks(options.world, kSaveCheckpoint);
  CheckpointParts parts;
  ranks.together([&] { parts = training_parts(checkpoint, ranks, options); });
  save_checkpoint_parts(path, parts, options);
}

LoadedCheckpoint load_checkpoint(const std::string& path, const Checkpoint& checkpoint,
                                 const LoadCheckpointOptions& options) {
  const RankGroup ranks(options.world, kLoadCheckpoint);
  CheckpointReader reader(path, options);
  LoadedCheckpoint loaded{.misfits = {}, .extra = reader.document(kExtraFile).value_or(""), .world_size = reader.world_size()};
  std::vector<CheckpointSection> sections;
  std::optional<OptimizerLoad> optimizer;
  std::optional<CheckpointSection> rng;
  ranks.together([&] {
    require_not_shown(checkpoint.model.get(), kLoadCheckpoint);
    const auto states = named_states(checkpoint.model.get());
    sections.push_back(model_section(states, std::nullopt));
    if (auto* given = checkpoint.optimizer.get()) {
      optimizer.emplace(optimizer_params(states, *given, kLoadCheckpoint), *given, saved_state(reader), options);
      if (optimizer->is_planned()) sections.push_back(optimizer->section());
    }
    if (!checkpoint.rng_state) return;
    rng = rng_section(ranks.rank(), ranks.size());
    loaded.restored_rng_state = can_restore_rng(reader, *rng, ranks.size());
    if (loaded.restored_rng_state) sections.push_back(*rng);
  });
  loaded.misfits = reader.load(sections, optimizer ? optimizer->misfits() : IncompatibleKeys{});
  if (optimizer) optimizer->finish();
  if (loaded.restored_rng_state) restore_rng(*rng, ranks.rank());
  return loaded;
}

}  // namespace fsdp
