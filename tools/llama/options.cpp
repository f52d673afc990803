#include "options.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <concepts>
#include <filesystem>
#include <fsdp/version.hpp>
#include <sstream>

namespace llama {
namespace {

/// Descriptions start in one column and are wrapped.
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_option(const CLI::Option* option, bool) const override {
    constexpr size_t kColumn = 30, kWidth = 98;
    auto text = fmt::format("  {} {}", option->get_name(false, true), option->get_type_name());
    text.resize(std::max(text.find_last_not_of(' ') + 1, kColumn - 1), ' ');
    size_t column = text.size();
    std::istringstream words(describe(*option));
    for (std::string word; words >> word; column += 1 + word.size()) {
      if (column + 1 + word.size() > kWidth) {
        text += "\n" + std::string(kColumn - 1, ' ');
        column = kColumn - 1;
      }
      text += " " + word;
    }
    return text + "\n";
  }

 private:
  static std::string describe(const CLI::Option& option) {
    const auto value = option.get_default_str();
    return value.empty() ? option.get_description()
                         : fmt::format("{} [{}]", option.get_description(), value);
  }
};

template <class Number>
CLI::Validator at_least(Number least, const char* what) {
  return CLI::Validator(
      [least, what](const std::string& text) {
        Number value{};
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
        const bool is_right = error == std::errc() && end == text.data() + text.size() &&
                              std::isfinite(static_cast<double>(value)) && value >= least;
        return is_right ? std::string() : fmt::format("is {}, not {}", what, text);
      },
      "", "");
}

/// Options of one group of the help text.
class Group {
 public:
  Group(CLI::App& app, std::string name) : app_(app), name_(std::move(name)) {}

  /// A whole number of at least `least`.
  template <std::integral Value>
  CLI::Option* add_count(const char* name, Value& value, std::type_identity_t<Value> least,
                         const char* text) {
    return add_text(name, value, text, "N")
        ->check(at_least<Value>(
            least, least == 0 ? "a whole number, 0 or more" : "a whole number, 1 or more"));
  }
  void add_number(const char* name, double& value, const char* text) {
    add_text(name, value, text, "X")->check(at_least(0.0, "a number, 0 or more"));
  }
  template <class Value>
  CLI::Option* add_text(const char* name, Value& value, const char* text, const char* type) {
    return app_.add_option(name, value, text)->group(name_)->type_name(type);
  }
  void add_flag(const char* name, bool& value, const char* text) {
    app_.add_flag(name, value, text)->group(name_);
  }

 private:
  CLI::App& app_;
  std::string name_;
};

void add_data(Group group, DataOptions& data) {
  group.add_text(
      "--data", data.path,
      "Text to learn: a file, or a folder with all text files below it. tools/train takes "
      "the sources of the Python standard library unless told otherwise",
      "PATH");
  group
      .add_text("--suffix", data.suffixes,
                "Of a folder, take only files whose names end in this; may be repeated", "TEXT")
      ->expected(1)
      ->take_all()
      ->default_str("");
  group.add_count("--eval-bytes", data.eval_bytes, 1,
                  "Held-out bytes that are scored at the end, at most");
}

void add_model(Group group, ModelOptions& model) {
  group.add_count("--layers", model.layers, 1, "Blocks");
  group.add_count("--dim", model.dim, 1, "Width of the residual stream");
  group.add_count("--heads", model.heads, 1, "Attention heads");
  group.add_count("--context", model.context, 1, "Bytes in a row, which the model sees at once");
  group.add_flag("--tied-output", model.tied_output,
                 "Use the embedding's weight for the output too");
}

void add_training(Group group, TrainingOptions& training) {
  group.add_count("--steps", training.steps, 1, "Optimizer steps");
  group.add_count("--global-batch", training.global_batch, 1,
                  "Rows a step, over all ranks; the number of ranks must divide it");
  group.add_number("--learning-rate", training.learning_rate,
                   "AdamW's, at its highest; it falls to a tenth along a cosine");
  group.add_count("--warmup", training.warmup, 0,
                  "Steps over which the learning rate rises from zero");
  group.add_number("--weight-decay", training.weight_decay, "AdamW's, for matrices only");
  group.add_number("--clip", training.clip,
                   "Gradients whose global norm is larger are scaled to it");
  group.add_count("--seed", training.seed, 0, "Of the weights, the batches and the sample");
}

void add_ranks(Group group, RankOptions& ranks) {
  group
      .add_count("--ranks", ranks.ranks, 1,
                 "Processes that share the model [one per GPU, or two on the CPU]")
      ->default_str("");
  group.add_text("--device", ranks.device, "auto, cpu or cuda", "WHICH");
  group.add_flag("--no-shard", ranks.no_shard,
                 "The plain model in one process, without any call of fully_shard");
  group.add_text(
      "--reshard-after-forward", ranks.reshard_after_forward,
      "What becomes of a block's full parameters between forward and backward. true: "
      "released; false: kept; a number: kept in pieces by groups of that many ranks; auto: "
      "released",
      "HOW");
  group.add_number("--timeout", ranks.timeout_s,
                   "Seconds after which a rank stops waiting for the others and fails");
}

void add_checkpoints(Group group, CheckpointOptions& checkpoints) {
  group.add_text("--save", checkpoints.save,
                 "Folder for checkpoints: step-100 and so on, of model, optimizer, step and random "
                 "generators. They are written while training goes on",
                 "PATH");
  group
      .add_count("--save-every", checkpoints.save_every, 1,
                 "Steps from one checkpoint to the next [only one, after the last step]")
      ->default_str("");
  group.add_count("--keep", checkpoints.keep, 0, "Checkpoints that stay, the last ones; 0: all");
  group.add_text("--resume", checkpoints.resume,
                 "Go on from this checkpoint, or from the last one in this folder, with any number "
                 "of ranks. Model, text, --seed and --global-batch must be the same",
                 "PATH");
}

void add_output(Group group, OutputOptions& output, bool& check) {
  group.add_text(
      "--json", output.json,
      "Where the run's record goes, one JSON object. tools/train writes train.json in the "
      "build folder unless told otherwise",
      "FILE");
  group.add_text("--timeline", output.timeline,
                 "What the ranks did in three steps, from the third on, in the Chrome trace format, which "
                 "ui.perfetto.dev opens and tools/timeline draws",
                 "FILE");
  group.add_flag("--report", output.report,
                 "Print the tree of groups with its bytes, the order of use, and what a byte budget would save");
  group.add_count("--sample-bytes", output.sample_bytes, 0, "Bytes to generate at the end");
  group.add_number("--temperature", output.temperature,
                   "Of the sample; 0 takes the likeliest byte");
  group.add_flag("--check", check,
                 "Look at the options and the data, print the number of ranks, and end");
}

int report_wrong_option(const std::string& what) {
  fmt::print(stderr, "tools/train: {}; tools/train --help lists the options\n", what);
  return 2;
}

bool is_reshard_mode(const std::string& mode) {
  return mode == "auto" || mode == "true" || mode == "false" ||
         (!mode.empty() && mode.size() < 7 &&
          mode.find_first_not_of("0123456789") == std::string::npos);
}

/// What stands against writing to the file that an option names; empty if nothing does.
std::string find_file_objection(const char* option, const std::string& file) {
  if (file.empty()) return {};
  const std::filesystem::path path(file);
  const auto folder = path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
  if (std::filesystem::is_directory(path)) return fmt::format("{} {} is a folder", option, file);
  if (!std::filesystem::is_directory(folder)) return fmt::format("{}: there is no folder {}", option, folder.string());
  if (access(folder.c_str(), W_OK) != 0)
    return fmt::format("{}: cannot write to folder {}", option, folder.string());
  return {};
}

/// The nearest folder that is there already, from `path` upwards.
std::filesystem::path existing_folder(std::filesystem::path path) {
  while (!std::filesystem::exists(path) && path.has_relative_path()) path = path.parent_path();
  return path;
}

std::string find_checkpoint_objection(const CheckpointOptions& options) {
  if (options.save.empty()) {
    if (options.save_every > 0)
      return "--save-every says when to save; add --save PATH, which says where";
    if (options.keep > 0)
      return "--keep says how many checkpoints stay; add --save PATH, which says where";
    return {};
  }
  const auto folder = existing_folder(std::filesystem::absolute(options.save));
  if (!std::filesystem::is_directory(folder))
    return fmt::format("--save {}: {} is no folder", options.save, folder.string());
  if (access(folder.c_str(), W_OK) != 0)
    return fmt::format("--save {}: cannot write to folder {}", options.save, folder.string());
  return {};
}

}  // namespace

std::optional<int> parse_options(int argc, char** argv, Options& options) {
  CLI::App app("Trains a byte-level Llama-style language model that is sharded over all ranks.",
               "tools/train");
  app.option_defaults()->always_capture_default();
  app.formatter(std::make_shared<HelpFormatter>());
  app.set_help_flag("-h,--help", "Print this and end");
  app.set_version_flag("--version", fmt::format("libfsdp {}", fsdp::version()), "Print the version of libfsdp and end");
  app.footer(
      "tools/train also takes --torch VERSION, the LibTorch to build with, and --cpu, for torch's wheel\n"
      "for CPUs. On 2 cores its first call takes 1 minute for the environment and at most 5 for the\n"
      "build, a later one a second, before the training begins.");
  add_data({app, "Data"}, options.data);
  add_model({app, "Model"}, options.model);
  add_training({app, "Training"}, options.training);
  add_ranks({app, "Ranks"}, options.ranks);
  add_checkpoints({app, "Checkpoints"}, options.checkpoints);
  add_output({app, "Output"}, options.output, options.check);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}\n", app.help());
    return 0;
  } catch (const CLI::CallForVersion& version) {
    fmt::print("{}\n", version.what());
    return 0;
  } catch (const CLI::ExtrasError&) {
    const auto extras = app.remaining();
    const auto option = std::ranges::find_if(
        extras, [](const std::string& extra) { return extra.starts_with('-'); });
    return report_wrong_option(
        fmt::format("unknown option {}", option != extras.end() ? *option : extras.front()));
  } catch (const CLI::ParseError& error) {
    return report_wrong_option(error.what());
  }
  return std::nullopt;
}

std::string find_contradiction(const Options& options, int ranks) {
  const auto& model = options.model;
  const auto& mode = options.ranks.reshard_after_forward;
  const auto& device = options.ranks.device;
  if (options.data.path.empty()) return "--data is missing: name a file or folder of text";
  if (device != "auto" && device != "cpu" && device != "cuda")
    return fmt::format("--device is auto, cpu or cuda, not {}", device);
  if (model.dim % model.heads != 0 || model.dim / model.heads % 2 != 0)
    return fmt::format("--dim {} needs to be an even multiple of --heads {}", model.dim,
                       model.heads);
  if (options.ranks.no_shard && ranks != 1)
    return fmt::format("--no-shard runs in one process, not in {}; add --ranks 1", ranks);
  if (options.training.global_batch % ranks != 0)
    return fmt::format("--global-batch {} cannot be divided among {} ranks; take a multiple of {}",
                       options.training.global_batch, ranks, ranks);
  if (!is_reshard_mode(mode))
    return fmt::format("--reshard-after-forward is auto, true, false or a number of ranks, not {}",
                       mode);
  if (mode.find_first_of("0123456789") == 0) {
    const int kept_over = std::stoi(mode);
    if (kept_over < 1 || ranks % kept_over != 0)
      return fmt::format("--reshard-after-forward {} does not divide {} ranks", mode, ranks);
  }
  if (!options.output.timeline.empty() && options.training.steps < 3)
    return "--timeline records from the third step on; take 3 --steps or more";
  if (options.ranks.no_shard && (options.output.report || !options.output.timeline.empty()))
    return "--report and --timeline show a sharded model; leave --no-shard out";
  for (const auto& objection : {find_checkpoint_objection(options.checkpoints),
                                find_file_objection("--json", options.output.json),
                                find_file_objection("--timeline", options.output.timeline)})
    if (!objection.empty()) return objection;
  return {};
}

}  // namespace llama
