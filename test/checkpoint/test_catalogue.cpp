#include "checkpoint/format/catalogue.hpp"

#include <catch2/catch.hpp>
#include <sys/stat.h>

#include "checkpoint/format/manifest.hpp"
#include "saved_parts.hpp"
#include "support/error_of.hpp"
#include "support/ranks.hpp"
#include "temporary_folder.hpp"

// Checkpoints from elsewhere, and damaged ones.

namespace fsdp::test {
namespace {

namespace fs = std::filesystem;
using Catch::Contains;

NamedTensors two() { return {{"a", torch::arange(6.).view({2, 3})}, {"b", torch::arange(5)}}; }

/// Two files, a and b, without a manifest.
void make_foreign(const TemporaryFolder& folder) {
  save_checkpoint_parts(folder / "c", {{whole_section(two())}}, {.max_file_bytes = 50});
  fs::remove(folder / "c/fsdp_manifest.json");
}

at::Tensor load_b(const std::string& path, const LoadCheckpointOptions& options = {}) {
  auto b = torch::zeros({5}, at::kLong);
  CheckpointReader(path, options).load({whole_section({{"a", torch::zeros({2, 3})}, {"b", b}})});
  return b;
}

std::string error_for(const std::string& path, const LoadCheckpointOptions& options = {}) {
  return error_of<CheckpointError>([&] { load_b(path, options); });
}

TEST_CASE("files without a manifest are read by their index, or as one file", "[checkpoint][catalogue]") {
  TemporaryFolder folder;
  make_foreign(folder);
  CHECK(load_b(folder / "c").equal(torch::arange(5)));
  auto b = torch::zeros({5}, at::kLong);
  CheckpointReader(folder / "c/model-00002-of-00002.safetensors").load({whole_section({{"b", b}})});
  CHECK(b.equal(torch::arange(5)));
  save_checkpoint_parts(folder / "one", {{whole_section(two())}});
  fs::remove(folder / "one/fsdp_manifest.json");
  fs::remove(folder / "one/model.safetensors.index.json");
  CHECK(load_b(folder / "one").equal(torch::arange(5)));
  fs::create_directory(folder / "empty");
  CHECK_THAT(error_for(folder / "empty"), Contains("no checkpoint"));
  CHECK_THAT(error_for(folder / "none"), Contains("no such file"));
}

TEST_CASE("symbolic links and what is no file are refused, links unless they are asked for", "[checkpoint][catalogue]") {
  TemporaryFolder folder;
  make_foreign(folder);
  const auto file = folder / "c/model-00002-of-00002.safetensors";
  fs::rename(file, folder / "elsewhere");
  fs::create_symlink(folder / "elsewhere", file);
  CHECK_THAT(error_for(folder / "c"), Contains(file) && Contains("symbolic link") && Contains("follow_symlinks"));
  CHECK(load_b(folder / "c", {.follow_symlinks = true}).equal(torch::arange(5)));
  fs::remove(file);
  REQUIRE(::mkfifo(file.c_str(), 0600) == 0);
  CHECK_THAT(error_for(folder / "c"), Contains("regular file"));
  fs::remove(file);
  CHECK_THAT(error_for(folder / "c"), Contains(file) && Contains("No such file"));
}

TEST_CASE("an index that names a tensor in the wrong file is refused", "[checkpoint][catalogue]") {
  TemporaryFolder folder;
  make_foreign(folder);
  write_bytes(folder / "c/model.safetensors.index.json", R"({"weight_map":{"a":"model-00002-of-00002.safetensors"}})");
  CHECK_THAT(error_for(folder / "c"), Contains("'a'") && Contains("does not have it"));
  write_bytes(folder / "c/model.safetensors.index.json", R"({"weight_map":{"a":"../c/model-00001-of-00002.safetensors"}})");
  CHECK_THAT(error_for(folder / "c"), Contains("'a'") && Contains("plain name"));
}

TEST_CASE("a byte that changed anywhere in a checkpoint is found, with file, tensor and bytes", "[checkpoint][catalogue]") {
  TemporaryFolder folder;
  const NamedTensors tensors{{"first", torch::rand({300'000})}, {"second", torch::rand({300'000})}};
  save_checkpoint_parts(folder / "c", {{whole_section(tensors)}, {{"notes.json", R"({"a": 1})"}}});
  const auto load = [&](VerifyChecksums verify) {
    const NamedTensors into{{"first", torch::zeros({300'000})}, {"second", torch::zeros({300'000})}};
    CheckpointReader reader(folder / "c", {.verify = verify});
    reader.load({whole_section(into)});
    return into;
  };
  for (const auto& name : folder.names("c")) {
    const auto path = folder / ("c/" + name), whole = read_bytes(path);
    if (name.ends_with("index.json")) continue;  // for other tools
    for (const size_t at : {size_t{20}, whole.size() / 2, whole.size() - 2}) {
      if (at >= whole.size()) continue;
      auto damaged = whole;
      damaged[at] ^= 4;
      write_bytes(path, damaged);
      CHECK_THAT(error_of<CheckpointError>([&] { load(VerifyChecksums::kWhileLoading); }), Contains(name));
    }
    write_bytes(path, whole);
  }
  const auto path = folder / "c/model.safetensors";
  auto damaged = read_bytes(path);
  damaged[1'300'000] ^= 1;
  write_bytes(path, damaged);
  CHECK_THAT(error_of<CheckpointError>([&] { load(VerifyChecksums::kBeforeLoading); }),
             Contains(path + ": bytes 1048576 to 2097152 are damaged") && Contains("'first', 'second'"));
  CHECK(load(VerifyChecksums::kNever)[0].second.equal(tensors[0].second));
  fs::resize_file(path, 2'000'000);
  CHECK_THAT(error_of<CheckpointError>([&] { load(VerifyChecksums::kNever); }), Contains("2000000 bytes"));
}

TEST_CASE("checked first, a damaged block changes nothing", "[checkpoint][catalogue]") {
  TemporaryFolder folder;
  save_checkpoint_parts(folder / "c", {{whole_section({{"a", torch::ones({600'000})}})}});
  const auto path = folder / "c/model.safetensors";
  auto damaged = read_bytes(path);
  damaged[2'000'000] ^= 1;
  write_bytes(path, damaged);
  CHECK(on_ranks(2, [&](Rank& rank) {
    auto a = torch::zeros({600'000});
    for (const auto readers : {CheckpointReaders::kAllRanks, CheckpointReaders::kFirstRank}) {
      CheckpointReader reader(folder / "c", {.world = rank.world(), .verify = VerifyChecksums::kBeforeLoading, .readers = readers});
      rank.check_throws<CheckpointError>([&] { reader.load({whole_section({{"a", a}})}); }, {"damaged"}, "checked first");
      rank.check(a.eq(0).all().item<bool>(), "nothing changed");
    }
    CheckpointReader reader(folder / "c", {.world = rank.world(), .readers = CheckpointReaders::kFirstRank});
    rank.check_throws<CheckpointError>([&] { reader.load({whole_section({{"a", a}})}); }, {"damaged", "'a'"}, "on the way");
  }));
}

TEST_CASE("find_damage tells every damaged block with its tensors, and other files of the manifest", "[checkpoint][catalogue]") {
  TemporaryFolder folder;
  save_checkpoint_parts(folder / "c", {{whole_section({{"a", torch::zeros({400'000})}, {"b", torch::zeros({3})}})},
                                       {{"extra.json", "{\"epoch\": 1}"}}});
  CHECK(CheckpointReader(folder / "c").find_damage().empty());
  auto bytes = read_bytes(folder / "c/model.safetensors");
  bytes[1000] ^= 1;
  bytes.back() ^= 1;
  write_bytes(folder / "c/model.safetensors", bytes);
  write_bytes(folder / "c/extra.json", "{\"epoch\": 2}");
  const auto damage = CheckpointReader(folder / "c", {.verify = VerifyChecksums::kNever}).find_damage();
  REQUIRE(damage.size() == 3);
  CHECK_THAT(damage[0], Catch::Contains("extra.json: bytes 0 to 12 are damaged"));
  CHECK_THAT(damage[1], Catch::Contains("bytes 0 to 1048576") && Catch::Contains("'a'"));
  CHECK_THAT(damage[2], Catch::Contains("bytes 1048576 to") && Catch::Contains("'b'"));
}

}  // namespace
}  // namespace fsdp::test
