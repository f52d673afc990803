#include "trace/desync/verdict/verdict.hpp"

#include <nlohmann/json.hpp>
#include <utility>

namespace fsdp {

std::string Verdict::encode() const {
  nlohmann::json value{{"text", text}, {"launched", nlohmann::json::array()}};
  if (difference.collective) value["collective"] = *difference.collective;
  for (const auto& [rank, what] : difference.launched) value["launched"].push_back({rank, what});
  // A module's name may hold any bytes.
  return value.dump(-1, ' ', /*ensure_ascii=*/false, nlohmann::json::error_handler_t::replace);
}

Verdict Verdict::decode(const std::string& encoded) {
  const auto value = nlohmann::json::parse(encoded, nullptr, /*allow_exceptions=*/false);
  if (!value.is_object() || !value.contains("text")) return {.text = encoded};
  Verdict verdict{.text = value["text"].get<std::string>()};
  if (value.contains("collective")) verdict.difference.collective = value["collective"].get<int64_t>();
  for (const auto& launch : value.value("launched", nlohmann::json::array()))
    verdict.difference.launched.emplace(launch[0].get<int>(), launch[1].get<std::string>());
  return verdict;
}

}  // namespace fsdp
