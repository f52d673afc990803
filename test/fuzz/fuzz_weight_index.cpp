#include <string_view>

#include "check.hpp"
#include "checkpoint/checkpoint_error.hpp"
#include "checkpoint/format/weight_index.hpp"

// model.safetensors.index.json: whatever it has, no file outside its folder is named.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t count) {
  try {
    const auto index = fsdp::parse_weight_index({reinterpret_cast<const char*>(bytes), count}, "index");
    for (const auto& [tensor, file] : index.files) {
      check(file.find('/') == std::string::npos, "a file of the index lies beside it");
      check(file.ends_with(".safetensors"), "a file of the index is a .safetensors file");
    }
    const auto again = fsdp::parse_weight_index(fsdp::make_weight_index(index, "index"), "index");
    check(again.files == index.files, "an index is read as it was written");
  } catch (const fsdp::CheckpointError&) {
  }
  return 0;
}
