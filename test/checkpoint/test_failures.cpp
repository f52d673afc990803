#include <catch2/catch.hpp>
#include <sys/mount.h>

#include "saved_parts.hpp"
#include "support/models.hpp"
#include "support/skip.hpp"
#include "temporary_folder.hpp"

// What goes wrong on one rank goes wrong on all, alike; the checkpoint that was there stays.

namespace fsdp::test {
namespace {

namespace fs = std::filesystem;
using at::Tensor;

NamedTensors tensors(double value) { return {{"w", torch::full({100'000}, value)}}; }

void check_still_there(const Rank& rank, const TemporaryFolder& folder, const std::set<std::string>& names, double value) {
  const auto w = torch::zeros({100'000});
  CheckpointReader(folder / "c", {.world = rank.world()}).load({whole_section({{"w", w}})});
  rank.check_equal(w[99'999].item<double>(), value, "the old checkpoint");
  rank.check_equal(folder.names(), names, "nothing beside it");
}

TEST_CASE("a folder that a rank does not see is an error on every rank", "[checkpoint][failures]") {
  TemporaryFolder folder, other;
  CHECK(on_ranks(3, [&](Rank& rank) {
    save_checkpoint_parts(folder / "c", {{whole_section(tensors(1))}}, {.world = rank.world()});
    const auto& own = rank.index() == 2 ? other : folder;
    rank.check_throws<CheckpointError>(
        [&] { save_checkpoint_parts(own / "c", {{whole_section(tensors(2))}}, {.world = rank.world()}); },
        {"rank 2", other / "c", "all ranks share"}, "save");
    check_still_there(rank, folder, {"c"}, 1);
    rank.check(other.names().empty(), "nothing in the other folder");
  }));
}

TEST_CASE("what one rank cannot give is an error on every rank before anything is written", "[checkpoint][failures]") {
  TemporaryFolder folder;
  CHECK(on_ranks(2, [&](Rank& rank) {
    const auto save = [&](const CheckpointParts& parts, SaveCheckpointOptions options = {}) {
      options.world = rank.world();
      save_checkpoint_parts(folder / "c", parts, options);
    };
    const bool is_last = rank.index() == 1;
    save({{whole_section(tensors(1))}});
    rank.check_throws<UsageError>([&] { save({{whole_section({{"w", is_last ? at::empty({2}, at::kMeta) : torch::ones({2})}})}}); },
                                  {"rank 1", "'w'", "meta"}, "meta");
    rank.check_throws<UsageError>([&] { save({{whole_section({{"w", torch::ones({is_last ? 2 : 3})}})}}); }, {"'w'", "(2)", "(3)"},
                                  "sizes that differ");
    rank.check_throws<UsageError>([&] { save({{whole_section({{"w", torch::ones({2}, is_last ? at::kComplexDouble : at::kFloat)}})}}); },
                                  {"rank 1", "ComplexDouble"}, "a dtype that the format does not have");
    CheckpointSection half{"model", {{.name = "w", .local = torch::ones({3}), .sizes = {8}, .ranges = {{0, 3}}, .is_sharded = true}}};
    rank.check_throws<UsageError>([&] { save({{half}}); }, {"3 of the 8 elements of 'w'"}, "elements that nobody has");
    half.tensors[0].ranges = {{is_last ? 3 : 0, is_last ? 8 : 4}};
    half.tensors[0].local = torch::ones({is_last ? 5 : 4});
    rank.check_throws<UsageError>([&] { save({{half}}); }, {"hold 9 elements of 'w', which has 8"}, "elements that two have");
    half.tensors[0].ranges = {{is_last ? 3 : 0, is_last ? 7 : 4}};
    half.tensors[0].local = torch::ones({4});
    rank.check_throws<UsageError>([&] { save({{half}}); }, {"the ranks' parts of 'w' overlap", "leave out others"},
                                  "one that two have, and one that nobody has");
    rank.check_throws<UsageError>([&] { save({{}, {{"a.json", "{"}}}); }, {"'a.json' is not JSON"}, "a document");
    rank.check_throws<UsageError>([&] { save({{}, {{"../a.json", "{}"}}}); }, {"'../a.json'"}, "a document elsewhere");
    rank.check_throws<UsageError>([&] { save({}, {.keep_last = -1}); }, {"keep_last"}, "options");
    check_still_there(rank, folder, {"c"}, 1);
  }));
}

TEST_CASE("a path under a file is an error on every rank", "[checkpoint][failures]") {
  TemporaryFolder folder;
  write_bytes(folder / "file", "");
  CHECK(on_ranks(2, [&](Rank& rank) {
    rank.check_throws<CheckpointError>(
        [&] { save_checkpoint_parts(folder / "file/c", {{whole_section(tensors(1))}}, {.world = rank.world()}); },
        {"rank 0", folder / "file"}, "save");
  }));
}

/// A small disk in memory, where the machine allows it.
class SmallDisk {
 public:
  explicit SmallDisk(const std::string& path) : path_(path) {
    fs::create_directory(path);
    is_mounted_ = ::mount("tmpfs", path.c_str(), "tmpfs", 0, "size=2m") == 0;
  }
  ~SmallDisk() {
    if (is_mounted_) ::umount2(path_.c_str(), MNT_DETACH);
  }
  bool is_mounted() const { return is_mounted_; }
  void make_read_only() const { REQUIRE(::mount("tmpfs", path_.c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, "size=2m") == 0); }

 private:
  std::string path_;
  bool is_mounted_ = false;
};

TEST_CASE("a full disk and a read-only one are errors on every rank, and nothing is lost", "[checkpoint][failures]") {
  TemporaryFolder folder;
  SmallDisk disk(folder / "disk");
  if (!disk.is_mounted()) {
    skip("no file system can be mounted here");
    return;
  }
  const auto run = [&](const NamedTensors& values, const std::string& reason) {
    CHECK(on_ranks(2, [&](Rank& rank) {
      rank.check_throws<CheckpointError>(
          [&] { save_checkpoint_parts(folder / "disk/c", {{whole_section(values)}}, {.world = rank.world()}); },
          {"rank 0", folder / "disk", reason}, "save");
      const auto w = torch::zeros({100'000});
      CheckpointReader(folder / "disk/c", {.world = rank.world()}).load({whole_section({{"w", w}})});
      rank.check_equal(w[5].item<double>(), 1.0, "the old checkpoint");
      rank.check_equal(folder.names("disk"), std::set<std::string>{"c"}, "nothing beside it");
    }));
  };
  save_checkpoint_parts(folder / "disk/c", {{whole_section(tensors(1))}});
  run({{"w", torch::zeros({1'000'000})}}, "No space left on device");
  disk.make_read_only();
  run(tensors(2), "Read-only file system");
}

}  // namespace
}  // namespace fsdp::test
