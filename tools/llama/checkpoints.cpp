#include "checkpoints.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>
#include <filesystem>
#include <nlohmann/json.hpp>

namespace llama {
namespace {

constexpr auto kProgram = "tools/train";
constexpr auto kDocument = "extra.json";

/// What stays the same from a run's beginning to its end, however often it is resumed: what makes
/// the model's parameters and the position in the data what they are.
nlohmann::json kept_options(const Options& options, const Corpus& corpus) {
  const auto& [layers, dim, heads, context, tied_output] = options.model;
  return {{"--layers", layers},
          {"--dim", dim},
          {"--heads", heads},
          {"--context", context},
          {"--tied-output", tied_output},
          {"--seed", options.training.seed},
          {"--global-batch", options.training.global_batch},
          {"--data", fmt::format("of {} bytes with the hash {:016x}", corpus.training.size(),
                                 text_hash(corpus.training))}};
}

/// "--layers 2", "no --tied-output".
std::string as_option(const std::string& name, const nlohmann::json& value) {
  if (value.is_boolean()) return value.get<bool>() ? name : "no " + name;
  return fmt::format("{} {}", name, value.is_string() ? value.get<std::string>() : value.dump());
}

void require_same_options(const std::string& path, const nlohmann::json& saved,
                          const nlohmann::json& given) {
  std::vector<std::string> before, now;
  for (const auto& [name, value] : given.items()) {
    const auto& was = saved.at(name);
    if (was == value) continue;
    before.push_back(as_option(name, was));
    now.push_back(as_option(name, value));
  }
  if (now.empty()) return;
  throw CheckpointsError(
      fmt::format("--resume {}: it was saved with {}, but this run has {}; give the same values, or start a new run without "
                  "--resume",
                  path, fmt::join(before, ", "), fmt::join(now, ", ")));
}

StartingPoint read_start(const std::string& path, const nlohmann::json& given) {
  const fsdp::CheckpointReader reader(path);
  const auto text = reader.document(kDocument);
  const auto document = nlohmann::json::parse(text.value_or("null"));
  if (!document.is_object() || document.value("program", "") != kProgram)
    throw CheckpointsError(
        fmt::format("--resume {}: it is no checkpoint of tools/train: {} is missing, or not from tools/train",
                    path, kDocument));
  require_same_options(path, document.at("options"), given);
  StartingPoint start{.checkpoint = path,
                      .step = document.at("step").get<int64_t>(),
                      .losses = document.at("losses").get<std::vector<double>>(),
                      .ranks = reader.world_size()};
  if (start.step < 1 || start.losses.size() != static_cast<size_t>(start.step))
    throw CheckpointsError(fmt::format("--resume {}: {} is damaged: it has {} losses for {} steps", path, kDocument,
                                       start.losses.size(), start.step));
  return start;
}

StartingPoint find_saved(const std::string& given_path, const nlohmann::json& given) {
  if (!std::filesystem::exists(given_path))
    throw CheckpointsError(fmt::format("--resume {}: there is no such folder", given_path));
  const auto latest = fsdp::latest_checkpoint(given_path);
  try {
    return read_start(latest.value_or(given_path), given);
  } catch (const fsdp::CheckpointError& error) {
    if (latest) throw CheckpointsError(fmt::format("--resume {}: {}", given_path, error.what()));
    throw CheckpointsError(
        fmt::format("--resume {}: it has no checkpoint in it, and cannot be read as one: {}",
                    given_path, error.what()));
  } catch (const nlohmann::json::exception& error) {
    throw CheckpointsError(fmt::format("--resume {}: {} is not as tools/train writes it: {}",
                                       given_path, kDocument, error.what()));
  }
}

std::string step_name(int64_t step) { return fmt::format("step-{}", step); }

/// A later checkpoint would be taken for the newest of this run, and what this run saves would be
/// removed before it.
void require_no_later(const std::string& folder, const StartingPoint& start) {
  const auto latest = fsdp::latest_checkpoint(folder);
  if (!latest) return;
  const auto digits = latest->substr(latest->find_last_not_of("0123456789") + 1);
  int64_t step = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  if (error == std::errc() && step <= start.step) return;
  throw CheckpointsError(
      fmt::format("--save {}: it has {}, and this run begins after step {}; go on from there with "
                  "--resume {}, or choose another folder",
                  folder, *latest, start.step, folder));
}

}  // namespace

StartingPoint find_start(const Options& options, const Corpus& corpus) {
  const auto& [save, save_every, keep, resume] = options.checkpoints;
  StartingPoint start;
  if (!resume.empty()) start = find_saved(resume, kept_options(options, corpus));
  if (start.step >= options.training.steps)
    throw CheckpointsError(
        fmt::format("--resume {}: it is at step {} already; take more --steps than {}, found {}",
                    start.checkpoint, start.step, start.step, options.training.steps));
  if (!options.output.timeline.empty() && options.training.steps - start.step < 3)
    throw CheckpointsError(
        fmt::format("--timeline records from the third step on, and {} are left after step {}; "
                    "take more --steps",
                    options.training.steps - start.step, start.step));
  if (!save.empty()) require_no_later(save, start);
  return start;
}

Checkpoints::Checkpoints(const Options& options, const Corpus& corpus, StartingPoint start)
    : options_(options.checkpoints), steps_(options.training.steps), start_(std::move(start)) {
  if (options_.save.empty()) return;
  kept_options_ = kept_options(options, corpus).dump();
  saver_ = std::make_unique<fsdp::CheckpointSaver>();
}

void Checkpoints::resume(LanguageModel& model, torch::optim::AdamW& optimizer) const {
  if (start_.checkpoint.empty()) return;
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> given;
  for (const auto& group : optimizer.param_groups()) given.push_back(group.options().clone());
  fsdp::load_checkpoint(start_.checkpoint, {model, optimizer});
  // What was saved is what the run had; --weight-decay says what it has from now on.
  for (size_t i = 0; i < given.size(); ++i)
    optimizer.param_groups()[i].set_options(std::move(given[i]));
}

void Checkpoints::save_if_due(LanguageModel& model, torch::optim::AdamW& optimizer,
                              const std::vector<double>& losses) {
  const auto step = static_cast<int64_t>(losses.size());
  const bool is_due =
      step == steps_ || (options_.save_every > 0 && step % options_.save_every == 0);
  if (!saver_ || !is_due) return;
  const nlohmann::json document = {{"program", kProgram},
                                   {"step", step},
                                   {"losses", losses},
                                   {"options", nlohmann::json::parse(kept_options_)}};
  saver_->start_save((std::filesystem::path(options_.save) / step_name(step)).string(),
                     {model, optimizer, document.dump()}, {.keep_last = options_.keep});
}

void Checkpoints::finish() {
  if (saver_) saver_->wait();
}

}  // namespace llama
