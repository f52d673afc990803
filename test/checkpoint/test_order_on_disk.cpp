#include <catch2/catch.hpp>

#include "checkpoint/io/file.hpp"
#include "recorded_files.hpp"
#include "saved_parts.hpp"
#include "support/ranks.hpp"
#include "temporary_folder.hpp"

// What a machine that loses its power finds: the order in which a save brings files to the disk and names them.

namespace fsdp::test {
namespace {

namespace fs = std::filesystem;
using Calls = std::vector<std::string>;

constexpr Exchanges kBoth[] = {Exchanges::kAllowed, Exchanges::kRefused};

void save(const std::string& path, int ranks, double value, SaveCheckpointOptions options = {}) {
  CHECK(on_ranks(ranks, [&](Rank& rank) {
    auto own = options;
    own.world = rank.world();
    own.max_file_bytes = 4'000;
    save_checkpoint_parts(path,
                          {{whole_section({{"a", torch::full({1'000}, value)}, {"b", torch::full({2'000}, value)}})},
                           {{"extra.json", "{}"}}},
                          own);
    rank.check(true, "saved");
  }));
}

TEST_CASE("the record notices what is named before it is on the disk", "[checkpoint][order_on_disk]") {
  TemporaryFolder folder;
  const RecordedFiles files(folder.path(), Exchanges::kAllowed);
  const auto make = [&](const std::string& name) {
    fs::create_directory(folder / name);
    write_text(folder / (name + "/a"), "text");  // synced
  };
  make(".one");
  File::folder(folder / ".one").sync();
  fs::rename(folder / ".one", folder / "one");
  CHECK(files.named_too_early() == Calls{});
  make(".two");
  fs::rename(folder / ".two", folder / "two");  // the folder is not
  CHECK(files.named_too_early() == Calls{".two"});
  make(".three");
  File::folder(folder / ".three").sync();
  File::open_to_write(folder / ".three/a").write_at(1, std::as_bytes(std::span("more")));
  fs::rename(folder / ".three", folder / "three");
  CHECK(files.named_too_early() == Calls{".two", ".three/a"});
}

TEST_CASE("nothing gets a checkpoint's name before all that it names is on the disk", "[checkpoint][order_on_disk]") {
  for (const int ranks : {1, 3})
    for (const auto exchanges : kBoth) {
      CAPTURE(ranks, exchanges == Exchanges::kRefused);
      TemporaryFolder folder;
      const RecordedFiles files(folder.path(), exchanges);
      for (const std::string name : {"step-1", "step-2", "step-2"}) save(folder / name, ranks, 1, {.keep_last = 1});
      write_bytes(folder / "step-2/config.json", "{}");
      fs::create_directories(folder / "step-2/notes/more");
      write_bytes(folder / "step-2/notes/more/a", "text");
      save(folder / "step-2", ranks, 2);
      CHECK(read_bytes(folder / "step-2/notes/more/a") == "text");
      CHECK(files.named_too_early() == Calls{});
    }
}

TEST_CASE("folders that a save makes above the checkpoint are on the disk before it has its name",
          "[checkpoint][order_on_disk]") {
  TemporaryFolder folder;
  const RecordedFiles files(folder.path(), Exchanges::kAllowed);
  save(folder / "runs/today/step-1", 2, 1);
  CHECK(files.named_too_early() == Calls{});
}

TEST_CASE("a save ends when the new name is on the disk", "[checkpoint][order_on_disk]") {
  TemporaryFolder folder;
  fs::create_directory(folder / "runs");
  for (const auto exchanges : kBoth) {
    const RecordedFiles files(folder.path(), exchanges);
    save(folder / "runs/new-" + (exchanges == Exchanges::kRefused ? "1" : "2"), 2, 1);
    const auto calls = files.of_folders();
    REQUIRE(calls.size() == 3);
    CHECK(calls[0].starts_with("sync runs/.new-"));
    CHECK(calls[1].starts_with("rename runs/.new-"));
    CHECK(calls[2] == "sync runs");
  }
}

TEST_CASE("the old checkpoint goes only when the new one's name is on the disk", "[checkpoint][order_on_disk]") {
  TemporaryFolder folder;
  fs::create_directory(folder / "runs");
  save(folder / "runs/c", 2, 1);
  {
    const RecordedFiles files(folder.path(), Exchanges::kAllowed);
    save(folder / "runs/c", 2, 2);
    CHECK(files.of_folders() == Calls{"sync runs/.c.fsdp-saving", "rename runs/.c.fsdp-saving runs/c", "sync runs"});
  }
  const RecordedFiles files(folder.path(), Exchanges::kRefused);
  save(folder / "runs/c", 2, 3);
  CHECK(files.of_folders() == Calls{"sync runs/.c.fsdp-saving", "rename runs/c runs/.c.fsdp-old",
                                    "rename runs/.c.fsdp-saving runs/c", "sync runs",
                                    "rename runs/.c.fsdp-old runs/.c.fsdp-removed", "sync runs"});
}

}  // namespace
}  // namespace fsdp::test
