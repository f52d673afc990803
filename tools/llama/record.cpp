#include "record.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

namespace llama {
namespace {

nlohmann::json describe(const Options& options) {
  const auto& [data, model, training, ranks, checkpoints, output, check] = options;
  return {{"data", data.path},
          {"layers", model.layers},
          {"dim", model.dim},
          {"heads", model.heads},
          {"context", model.context},
          {"tied_output", model.tied_output},
          {"global_batch", training.global_batch},
          {"learning_rate", training.learning_rate},
          {"warmup", training.warmup},
          {"weight_decay", training.weight_decay},
          {"clip", training.clip},
          {"seed", training.seed},
          {"no_shard", ranks.no_shard},
          {"reshard_after_forward", ranks.reshard_after_forward}};
}

}  // namespace

void write_record(const std::string& path, const RunRecord& record, const Options& options) {
  const nlohmann::json object = {{"ranks", record.ranks},
                                 {"parameters", record.parameters},
                                 {"steps", record.training.losses.size()},
                                 {"losses", record.training.losses},
                                 {"resumed_at_step", record.resumed_at_step},
                                 {"val_bits_per_byte", record.val_bits_per_byte},
                                 {"tokens_per_second", record.training.tokens_per_second},
                                 {"sharded_parameter_bytes", record.bytes.sharded},
                                 {"peak_unsharded_bytes", record.bytes.peak_unsharded},
                                 {"prompt", printable(record.sample.prompt)},
                                 {"sample", printable(record.sample.continuation)},
                                 {"config", describe(options)}};
  const auto aside = path + ".partial";
  std::ofstream file(aside);
  file << object.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
  file.close();
  std::error_code error;
  if (file) std::filesystem::rename(aside, path, error);
  if (!file || error) throw std::runtime_error(fmt::format("cannot write the record {}", path));
}

}  // namespace llama
