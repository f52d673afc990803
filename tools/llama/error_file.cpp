#include "error_file.hpp"

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

namespace llama {

bool write_error_file(const std::string& message) {
  const char* path = std::getenv("TORCHELASTIC_ERROR_FILE");
  if (path == nullptr || *path == '\0') return false;
  if (std::filesystem::exists(path)) return true;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now).count();
  // As torch.distributed.elastic.multiprocessing.errors writes it.
  const nlohmann::json error = {
      {"message", {{"message", message}, {"extraInfo", {{"timestamp", std::to_string(seconds)}}}}}};
  std::ofstream file(path);
  // A name in a message may be no UTF-8.
  file << error.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << std::flush;
  return file.good();
}

}  // namespace llama
