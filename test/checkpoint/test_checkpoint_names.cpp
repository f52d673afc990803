#include "checkpoint/io/checkpoint_names.hpp"

#include <catch2/catch.hpp>

#include "fsdp/error.hpp"
#include "support/error_of.hpp"
#include "temporary_folder.hpp"

namespace fsdp::test {
namespace {

namespace fs = std::filesystem;
using Sorted = std::vector<std::string>;

TEST_CASE("a hidden name tells which checkpoint's save left it", "[checkpoint][checkpoint_names]") {
  for (const std::string kind : {"saving-00", "old-00", "removed-00"}) CHECK(left_by(hidden_name("step-1", kind)) == "step-1");
  CHECK(hidden_name("c", "saving-00") == ".c.fsdp-saving-00");
  CHECK(left_by(".a.fsdp-old-b.fsdp-saving-00") == "a.fsdp-old-b");
  for (const std::string other : {"", "c", ".c", ".c.fsdp-lock", ".fsdp-saving-00", "c.fsdp-saving-00"})
    CHECK(left_by(other) == std::nullopt);
}

TEST_CASE("a checkpoint's path has no slash at its end, and a name", "[checkpoint][checkpoint_names]") {
  CHECK(checkpoint_path("/a/./b//c/") == "/a/b/c");
  CHECK(saving_folder("/a/c", "00") == "/a/.c.fsdp-saving-00");
  CHECK_THAT(error_of<UsageError>([] { checkpoint_path("/"); }), Catch::Contains("not the path of a folder"));
}

TEST_CASE("the number at the end of a name is its place in a series", "[checkpoint][checkpoint_names]") {
  const auto series = series_name("step-0012");
  REQUIRE(series);
  CHECK(series->prefix == "step-");
  CHECK(series->number == 12);
  CHECK(series_name("7")->prefix.empty());
  CHECK(!series_name("step-"));
  CHECK(!series_name("step-99999999999999999999"));
}

TEST_CASE("a series has its whole checkpoints, by number", "[checkpoint][checkpoint_names]") {
  TemporaryFolder folder;
  for (const std::string name : {"step-10", "step-9", "best-3", ".step-4.fsdp-old-00", ".step-5.fsdp-saving-00"}) {
    fs::create_directory(folder / name);
    write_bytes(folder / name + "/fsdp_manifest.json", "");
  }
  fs::create_directory(folder / "step-11");
  CHECK(series_in(folder.path(), "step-") == Sorted{"step-4", "step-9", "step-10"});
  CHECK(series_in(folder.path(), std::nullopt) == Sorted{"best-3", "step-4", "step-9", "step-10"});
  CHECK(readable_checkpoint(folder / "step-4") == folder / ".step-4.fsdp-old-00");
  CHECK(readable_checkpoint(folder / "step-9") == folder / "step-9");
  CHECK(readable_checkpoint(folder / "step-5") == folder / "step-5");
}

}  // namespace
}  // namespace fsdp::test
