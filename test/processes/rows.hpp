#pragma once

// What the programs share that are compared with FSDP1 and FSDP2 row by row; rows.py is their counterpart.

#include <torch/torch.h>
#include <fsdp/fsdp.hpp>

#include <fmt/format.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

namespace fsdp::test {

using nlohmann::json;

inline constexpr int64_t kWidth = 6, kInner = 8, kOutputs = 2, kBlocks = 3, kBatch = 4;

inline at::Tensor read_doubles(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const auto bytes = static_cast<int64_t>(file.tellg());
  if (!file || bytes <= 0) throw std::runtime_error("cannot read " + path);
  auto values = torch::empty({bytes / 8}, torch::kDouble);
  file.seekg(0);
  file.read(static_cast<char*>(values.mutable_data_ptr()), bytes);
  return values;
}

inline void append(json& values, const at::Tensor& tensor) {
  const auto flat = tensor.to(torch::kDouble).contiguous();
  const auto* data = flat.const_data_ptr<double>();
  for (int64_t i = 0; i < flat.numel(); ++i) values.push_back(data[i]);
}

/// A program's main. results_of(world, rows, weights, inputs): an object by row. `inputs`: 1-D, all ranks'.
template <class ResultsOf>
int run_rows(int argc, char** argv, ResultsOf&& results_of) {
  try {
    if (argc != 2) throw std::runtime_error("expected one argument, a folder");
    const std::string folder = argv[1];
    const auto rows = json::parse(std::ifstream(folder + "/rows.json"));
    const auto world = init_process_group({.backend = "gloo"});
    const json results =
        results_of(world, rows, read_doubles(folder + "/weights.bin"), read_doubles(folder + "/inputs.bin"));
    std::ofstream(fmt::format("{}/libfsdp_{}.json", folder, world->rank())) << results;
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

}  // namespace fsdp::test
