#include <catch2/catch.hpp>

#include <cstdlib>
#include <random>

#include "checkpoint/format/manifest.hpp"
#include "checkpoint/format/safetensors.hpp"
#include "checkpoint/format/weight_index.hpp"
#include "fsdp/checkpoint_parts.hpp"

// Headers, indexes and manifests changed at random: whatever comes, a reader returns or throws CheckpointError, and what
// it returns keeps the format's rules. FSDP_MUTATIONS says how many of each are tried.

namespace fsdp::test {
namespace {

int mutations() {
  const char* count = std::getenv("FSDP_MUTATIONS");
  return count == nullptr ? 3000 : std::atoi(count);
}

/// Texts that are worth more than random bytes.
const std::vector<std::string>& tokens() {
  static const std::vector<std::string> all{
      "-1", "0", "1", "4", "8", "9223372036854775807", "9223372036854775808", "18446744073709551615", "18446744073709551616",
      "1e999", "1.5", "null", "true", "[]", "{}", "[[", "\"\"", "\"F32\"", "\"BF16\"", "\"U8\"", "\"shape\":", "\"data_offsets\":",
      "\"__metadata__\":", ",", ":", "\"", "\\u0000", "\\ud800", "../", "/", "\xff", std::string(1, '\0'), "\"a\":", "\"w\":"};
  return all;
}

std::string mutate(std::string text, std::mt19937_64& draw) {
  for (uint64_t i = 1 + draw() % 4; i > 0; --i) {
    const size_t at = text.empty() ? 0 : draw() % text.size();
    switch (draw() % 6) {
      case 0: text.insert(at, tokens()[draw() % tokens().size()]); break;
      case 1: text.replace(at, draw() % 8, tokens()[draw() % tokens().size()]); break;
      case 2: text.erase(at, draw() % 16); break;
      case 3: text.insert(at, text.substr(draw() % (text.size() + 1), draw() % 60)); break;
      case 4: if (!text.empty()) text[at] = static_cast<char>(draw()); break;
      default: text.resize(at); break;
    }
  }
  return text;
}

template <class Parse>
void try_all(const std::vector<std::string>& corpus, Parse&& parse) {
  std::mt19937_64 draw(3);
  int accepted = 0;
  for (int i = 0; i < mutations(); ++i) {
    const auto text = mutate(corpus[draw() % corpus.size()], draw);
    try {
      parse(text);
      ++accepted;
    } catch (const CheckpointError&) {
    } catch (const std::exception& error) {
      FAIL("another error: " << error.what() << " for " << text);
    }
  }
  CHECK(accepted < mutations());
}

const std::vector<std::string>& headers() {
  static const std::vector<std::string> all{
      R"({"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}})",
      R"({"__metadata__":{"format":"pt","fsdp.other_names":"{\"a\":\"w\"}"},"w":{"dtype":"BF16","shape":[],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[22],"data_offsets":[2,24]}})",
      R"({"a":{"dtype":"I64","shape":[0],"data_offsets":[0,0]},"b":{"dtype":"I64","shape":[3,1],"data_offsets":[0,24]}})"};
  return all;
}

TEST_CASE("no header makes its reader fail otherwise than by an error", "[checkpoint][broken_files]") {
  try_all(headers(), [](const std::string& text) {
    const auto header = parse_safetensors(text, 24, "f");
    int64_t end = header.data_begin;
    for (const auto& tensor : header.tensors) {
      REQUIRE(tensor.offset == end);
      REQUIRE(tensor.bytes == checked_bytes(tensor.sizes, tensor.dtype, "t"));
      end += tensor.bytes;
    }
    REQUIRE(end == header.data_begin + 24);
  });
}

TEST_CASE("no index makes its reader fail otherwise, or names a file elsewhere", "[checkpoint][broken_files]") {
  try_all({R"({"metadata":{"total_size":24},"weight_map":{"w":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}})",
           R"({"weight_map":{}})"},
          [](const std::string& text) {
            for (const auto& [tensor, file] : parse_weight_index(text, "i").files) {
              REQUIRE(file.find('/') == std::string::npos);
              REQUIRE(file.ends_with(".safetensors"));
            }
          });
}

TEST_CASE("no manifest makes its reader fail otherwise, or is taken changed", "[checkpoint][broken_files]") {
  const auto good = make_manifest({.world_size = 2,
                                   .files = {{"model.safetensors", {2'000'000, {1, 2}}}, {"extra.json", {2, {7}}}},
                                   .sections = {{"model", {"model.safetensors"}}},
                                   .documents = {"extra.json"}});
  const auto manifest = parse_manifest(good, "m");
  CHECK(manifest.world_size == 2);
  CHECK(manifest.files.at("model.safetensors").sums == std::vector<uint32_t>{1, 2});
  CHECK(manifest.sections.at("model") == std::vector<std::string>{"model.safetensors"});
  CHECK(manifest.documents == std::vector<std::string>{"extra.json"});
  try_all({good}, [&](const std::string& text) {
    const auto parsed = parse_manifest(text, "m");
    REQUIRE(make_manifest(parsed) == good);
  });
}

}  // namespace
}  // namespace fsdp::test
