#include "checkpoint/format/safetensors.hpp"

#include <catch2/catch.hpp>

#include <cstring>

#include "checkpoint/format/weight_index.hpp"
#include "fsdp/checkpoint_parts.hpp"
#include "support/error_of.hpp"
#include "temporary_folder.hpp"

namespace fsdp::test {
namespace {

std::string error_in(const std::string& json, int64_t data_bytes) {
  return error_of<CheckpointError>([&] { parse_safetensors(json, data_bytes, "f.safetensors"); });
}

SafetensorsHeader read_file(const std::string& bytes) {
  TemporaryFolder folder;
  write_bytes(folder / "f.safetensors", bytes);
  return read_safetensors(File::open_in(File::folder(folder.path()), "f.safetensors", false));
}

std::string with_length(uint64_t length, const std::string& rest) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + rest;
}

TEST_CASE("a header that was written is read back, its data at a multiple of 8", "[checkpoint][safetensors]") {
  std::vector<SafetensorsEntry> tensors{{"a.weight", at::kFloat, {2, 3}}, {"b", at::kBFloat16, {}}, {"none", at::kLong, {0, 4}}};
  const auto bytes = make_safetensors(tensors, {{"format", "pt"}}, "f.safetensors");
  CHECK(bytes.size() % 8 == 0);
  const auto header = read_file(bytes + std::string(26, 'x'));
  CHECK(header.metadata == std::map<std::string, std::string>{{"format", "pt"}});
  REQUIRE(header.tensors.size() == 3);
  CHECK(header.tensors[0].name == "a.weight");
  CHECK(header.tensors[0].sizes == std::vector<int64_t>{2, 3});
  CHECK(header.tensors[0].offset == static_cast<int64_t>(bytes.size()));
  CHECK(header.tensors[1].offset == static_cast<int64_t>(bytes.size()) + 24);
  CHECK(header.tensors[1].dtype == at::kBFloat16);
  CHECK(header.tensors[2].bytes == 0);
}

TEST_CASE("64 MiB of data begin at a multiple of 1 MiB, and less right behind the header", "[checkpoint][safetensors]") {
  const auto begin_of = [](int64_t bytes) {
    std::vector<SafetensorsEntry> tensors{{"a", at::kByte, {bytes}}};
    const auto header = make_safetensors(tensors, {}, "f.safetensors");
    CHECK(tensors[0].offset == static_cast<int64_t>(header.size()));
    CHECK(parse_safetensors(header.substr(8), bytes, "f.safetensors").tensors[0].offset == tensors[0].offset);
    return tensors[0].offset;
  };
  CHECK(begin_of(64 << 20) == 1 << 20);
  CHECK(begin_of((64 << 20) - 1) < 128);
}

TEST_CASE("a header that breaks the format's rules is refused with the tensor's name", "[checkpoint][safetensors]") {
  using Catch::Contains;
  const auto one = [](const std::string& entry) { return R"({"w":)" + entry + "}"; };
  CHECK_THAT(error_in("{", 0), Contains("f.safetensors") && Contains("not JSON"));
  CHECK_THAT(error_in("[1]", 0), Contains("not an object"));
  CHECK_THAT(error_in("\xff\xfe", 0), Contains("not JSON"));
  CHECK_THAT(error_in(one("3"), 0), Contains("tensor 'w'") && Contains("not an object"));
  CHECK_THAT(error_in(one(R"({"dtype":"F32","shape":[1]})"), 4), Contains("'w'") && Contains("data_offsets"));
  CHECK_THAT(error_in(one(R"({"dtype":"F31","shape":[1],"data_offsets":[0,4]})"), 4), Contains("'w'") && Contains("F31"));
  CHECK_THAT(error_in(one(R"({"dtype":"F32","shape":[-1],"data_offsets":[0,4]})"), 4), Contains("'w'") && Contains("whole number"));
  CHECK_THAT(error_in(one(R"({"dtype":"F32","shape":[1.5],"data_offsets":[0,4]})"), 4), Contains("whole number"));
  CHECK_THAT(error_in(one(R"({"dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,4]})"), 4), Contains("whole number"));
  CHECK_THAT(error_in(one(R"({"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]})"), 4), Contains("64 bits"));
  CHECK_THAT(error_in(one(R"({"dtype":"F64","shape":[9223372036854775807],"data_offsets":[0,4]})"), 4), Contains("64 bits"));
  CHECK_THAT(error_in(one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})"), 4), Contains("takes 8 bytes") && Contains("gives it 4"));
  CHECK_THAT(error_in(one(R"({"dtype":"F32","shape":[1],"data_offsets":[4,0]})"), 4), Contains("not within"));
  CHECK_THAT(error_in(one(R"({"dtype":"F32","shape":[1],"data_offsets":[4,8]})"), 4), Contains("not within"));
  CHECK_THAT(error_in(one(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4,8]})"), 4), Contains("3 numbers"));
  CHECK_THAT(error_in(one(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4],"more":1})"), 4), Contains("'more'"));
  CHECK_THAT(error_in(R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})", 2),
             Contains("'w' is there twice"));
  CHECK_THAT(error_in(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})", 3),
             Contains("'b'") && Contains("within the one before it"));
  CHECK_THAT(error_in(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})", 3),
             Contains("'b'") && Contains("belong to no tensor"));
  CHECK_THAT(error_in(one(R"({"dtype":"U8","shape":[1],"data_offsets":[0,1]})"), 9), Contains("has 9"));
  CHECK_THAT(error_in(R"({"__metadata__":{"a":1}})", 0), Contains("not a string"));
  CHECK_THAT(error_in(R"({"__metadata__":7})", 0), Contains("not an object"));
}

TEST_CASE("nesting does not cost a stack, however deep", "[checkpoint][safetensors]") {
  CHECK_THAT(error_in(std::string(5'000'000, '['), 0), Catch::Contains("nested"));
  std::string objects;
  for (int i = 0; i < 200'000; ++i) objects += R"({"a":)";
  CHECK_THAT(error_in(objects, 0), Catch::Contains("nested"));
}

TEST_CASE("a length that the file does not have is refused before memory is asked for", "[checkpoint][safetensors]") {
  using Catch::Contains;
  const auto error_for = [](const std::string& bytes) { return error_of<CheckpointError>([&] { read_file(bytes); }); };
  CHECK_THAT(error_for(""), Contains("0 bytes"));
  CHECK_THAT(error_for("1234567"), Contains("7 bytes"));
  CHECK_THAT(error_for(with_length(3, "{}")), Contains("no .safetensors file"));
  CHECK_THAT(error_for(with_length(uint64_t{1} << 63, "{}")), Contains("no .safetensors file"));
  CHECK_THAT(error_for(with_length(~uint64_t{0}, "{}")), Contains("no .safetensors file"));
  CHECK_THAT(error_for(with_length(2, "{}x")), Contains("has 1 after its header"));
}

TEST_CASE("an index leads to no file outside its folder", "[checkpoint][weight_index]") {
  for (const std::string name : {"../m.safetensors", "/etc/m.safetensors", "a/m.safetensors", "..", ".safetensors", "",
                                 "m.bin", ".m.safetensors", "a\\\\m.safetensors", "m\\u0000.safetensors"}) {
    const auto error = error_of<CheckpointError>(
        [&] { parse_weight_index(R"({"weight_map":{"w":")" + name + R"("}})", "index.json"); });
    CHECK_THAT(error, Catch::Contains("index.json") && Catch::Contains("'w'"));
  }
  CHECK_THAT(error_of<CheckpointError>([] { parse_weight_index(R"({"weight_map":{"w":3}})", "i"); }), Catch::Contains("'w' is not a string"));
  CHECK_THAT(error_of<CheckpointError>([] { parse_weight_index(R"({})", "i"); }), Catch::Contains("weight_map"));
  const auto index = parse_weight_index(make_weight_index({12, {{"w", "m-1.safetensors"}}}, "i"), "i");
  CHECK(index.total_bytes == 12);
  CHECK(index.files.at("w") == "m-1.safetensors");
}

}  // namespace
}  // namespace fsdp::test
