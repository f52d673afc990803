#include <fmt/format.h>

#include <fsdp/error.hpp>
#include <fsdp/process_group.hpp>

#include "checkpoints.hpp"
#include "error_file.hpp"
#include "record.hpp"

namespace llama {
namespace {

constexpr int kFailed = 1, kWrongOption = 2;

/// One line on standard error, or in the file of which torchrun shows it.
int fail(int exit_code, const std::string& message) {
  if (!write_error_file(message)) fmt::print(stderr, "tools/train: {}\n", message);
  return exit_code;
}

std::string reason(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch ? of_torch->what_without_backtrace() : error.what();
}

int gpus(const RankOptions& options) {
  return options.device == "cpu" ? 0 : static_cast<int>(torch::cuda::device_count());
}

/// The number of processes that options ask for.
int planned_ranks(const RankOptions& options) {
  if (options.ranks > 0) return options.ranks;
  if (options.no_shard) return 1;
  return gpus(options) > 0 ? gpus(options) : 2;
}

ModelConfig model_config(const ModelOptions& options) {
  return {.layers = options.layers,
          .dim = options.dim,
          .heads = options.heads,
          .context = options.context,
          .tied_output = options.tied_output};
}

/// What stands against these options with this many ranks; empty if nothing does.
std::string find_objection(const Options& options, int ranks) {
  if (options.ranks.device == "cuda" && gpus(options.ranks) < (options.ranks.no_shard ? 1 : ranks))
    return fmt::format("--device cuda needs a GPU for each of {} ranks, found {}", ranks,
                       gpus(options.ranks));
  return find_contradiction(options, ranks);
}

int64_t count_parameters(const LanguageModel& model) {
  int64_t count = 0;
  for (const auto& parameter : model->parameters()) count += parameter.numel();
  return count;
}

void announce(const RunRecord& record, const Corpus& corpus, const Execution& execution,
              const Checkpoints& checkpoints, const Options& options) {
  fmt::print(
      "{} parameters on {} {}, {}\n", record.parameters, record.ranks,
      record.ranks == 1 ? "rank" : "ranks",
      fmt::format("{}{}", execution.device().str(), options.ranks.no_shard ? ", not sharded" : ""));
  fmt::print("{} of training text in {} files, {} held out in {}\n",
             format_bytes(static_cast<int64_t>(corpus.training.size())), corpus.training_files,
             format_bytes(static_cast<int64_t>(corpus.held_out.size())), corpus.held_out_files);
  if (const auto& start = checkpoints.start(); !start.checkpoint.empty())
    fmt::print("resumed at step {} from {}, which {} {} saved\n", start.step, start.checkpoint,
               start.ranks, start.ranks == 1 ? "rank" : "ranks");
  std::fflush(stdout);
}

void report(const RunRecord& record, const Options& options) {
  fmt::print("held-out bits per byte: {:.3f}\n", record.val_bits_per_byte);
  if (options.output.sample_bytes > 0)
    fmt::print("sample (the prompt is held-out text up to the bar):\n{}|{}\n",
               printable(record.sample.prompt), printable(record.sample.continuation));
  if (options.output.json.empty()) return;
  write_record(options.output.json, record, options);
  fmt::print("record: {}\n", options.output.json);
}

void train_and_report(LanguageModel& model, Execution& execution, const Corpus& corpus, const Options& options,
                      StartingPoint start, RunRecord record) {
  record.ranks = execution.ranks();
  const bool speaks = execution.rank() == 0;
  Checkpoints checkpoints(options, corpus, std::move(start));
  record.resumed_at_step = checkpoints.start().step;
  if (speaks) announce(record, corpus, execution, checkpoints, options);

  Progress progress(speaks);
  record.training = train(model, execution, corpus, options.training, checkpoints, progress);
  const auto shard_report = execution.report();  // of the last training step
  model->eval();
  record.val_bits_per_byte = held_out_bits_per_byte(execution, model->config(), corpus, options);
  record.sample =
      generate(execution, model->config(), corpus.held_out, options.output, options.training.seed);
  record.bytes = execution.held_bytes();
  execution.write_timeline();
  if (!speaks) return;
  if (options.output.report) fmt::print("{}", shard_report);
  if (!options.output.timeline.empty()) fmt::print("timeline: {}\n", options.output.timeline);
  report(record, options);
}

void run(const Options& options, const Corpus& corpus, StartingPoint start) {
  // The same weights on every rank: each draws them from the seed, before anything is sharded.
  torch::manual_seed(options.training.seed);
  LanguageModel model(model_config(options.model));
  RunRecord record;
  record.parameters = count_parameters(model);
  const auto execution =
      options.ranks.no_shard ? run_plain(model, options.ranks) : run_sharded(model, options);
  try {
    train_and_report(model, *execution, corpus, options, std::move(start), std::move(record));
  } catch (const std::exception& error) {
    // While the other ranks still reach this one: they fail when it is gone, and it shall have been the first to say why.
    write_error_file(reason(error));
    throw;
  }
}

int main(int argc, char** argv) {
  Options options;
  if (const auto exit_code = parse_options(argc, argv, options)) return *exit_code;
  const int started = options.ranks.no_shard ? 1 : fsdp::launch_environment().world_size;
  const int ranks = options.check ? planned_ranks(options.ranks) : started;
  if (options.ranks.ranks > 0 && options.ranks.ranks != ranks)
    return fail(kWrongOption, fmt::format("--ranks {}, but {} processes were started; use "
                                          "tools/train, or torchrun --nproc-per-node {}",
                                          options.ranks.ranks, ranks, options.ranks.ranks));
  if (const auto objection = find_objection(options, ranks); !objection.empty())
    return fail(kWrongOption, objection);

  Corpus corpus;
  StartingPoint start;
  try {
    corpus = read_corpus(options.data.path, options.data.suffixes, options.model.context + 1);
    start = find_start(options, corpus);
  } catch (const CheckpointsError& error) {
    return fail(kWrongOption, error.what());
  } catch (const DataError& error) {
    return fail(kWrongOption, fmt::format("--data: {}", error.what()));
  }
  if (options.check) {
    fmt::print("{}\n", ranks);
    return 0;
  }
  run(options, corpus, std::move(start));
  return 0;
}

}  // namespace
}  // namespace llama

int main(int argc, char** argv) {
  try {
    return llama::main(argc, argv);
  } catch (const std::exception& error) {
    return llama::fail(llama::kFailed, llama::reason(error));
  }
}
