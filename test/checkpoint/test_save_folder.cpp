#include "checkpoint/io/save_folder.hpp"

#include <catch2/catch.hpp>

#include "fsdp/fsdp.hpp"
#include "support/error_of.hpp"
#include "temporary_folder.hpp"

namespace fsdp::test {
namespace {

namespace fs = std::filesystem;
using Catch::Contains;
using Names = std::set<std::string>;

CheckpointParts parts(float value) {
  return {{{"model", {{.name = "w", .local = at::full({4}, value), .sizes = {4}}}}}};
}

float saved_value(const std::string& path) {
  const auto local = at::zeros({4});
  CheckpointReader(path).load({{"model", {{.name = "w", .local = local, .sizes = {4}}}}});
  return local[3].item<float>();
}

TEST_CASE("a checkpoint at the path is replaced, with nothing left beside it", "[checkpoint][save_folder]") {
  TemporaryFolder folder;
  save_checkpoint_parts(folder / "c", parts(1));
  save_checkpoint_parts(folder / "c/", parts(2));
  CHECK(saved_value(folder / "c") == 2);
  CHECK(folder.names() == Names{"c"});
  CHECK(folder.names("c") == Names{"model.safetensors", "model.safetensors.index.json", "fsdp_manifest.json"});
}

TEST_CASE("files that somebody put into the folder stay in it", "[checkpoint][save_folder]") {
  TemporaryFolder folder;
  save_checkpoint_parts(folder / "c", parts(1), {.max_file_bytes = 8});
  write_bytes(folder / "c/config.json", "{}");
  fs::create_directory(folder / "c/notes");
  write_bytes(folder / "c/notes/a", "text");
  save_checkpoint_parts(folder / "c", parts(2));
  CHECK(read_bytes(folder / "c/config.json") == "{}");
  CHECK(read_bytes(folder / "c/notes/a") == "text");
  CHECK(saved_value(folder / "c") == 2);
}

TEST_CASE("what is no checkpoint is not replaced", "[checkpoint][save_folder]") {
  TemporaryFolder folder;
  fs::create_directory(folder / "c");
  write_bytes(folder / "c/thesis.txt", "text");
  write_bytes(folder / "file", "text");
  fs::create_directory_symlink(folder / "c", folder / "link");
  for (const std::string name : {"c", "file", "link"})
    CHECK_THAT(error_of<CheckpointError>([&] { save_checkpoint_parts(folder / name, parts(1)); }),
               Contains(folder / name) && Contains("is there already"));
  CHECK(folder.names() == Names{"c", "file", "link"});
  CHECK(read_bytes(folder / "c/thesis.txt") == "text");
  fs::create_directory(folder / "empty");
  save_checkpoint_parts(folder / "empty", parts(3));
  CHECK(saved_value(folder / "empty") == 3);
}

TEST_CASE("two saves to one path at a time are an error of the second", "[checkpoint][save_folder]") {
  TemporaryFolder folder;
  {
    SaveFolder first(folder / "c");
    CHECK_THAT(error_of<CheckpointError>([&] { save_checkpoint_parts(folder / "c", parts(1)); }), Contains("another save"));
    CHECK(fs::exists(first.folder()));
  }
  CHECK(folder.names().empty());
  save_checkpoint_parts(folder / "c", parts(1));
}

TEST_CASE("what killed saves left is removed, of this path and of its series, but for what is being written",
          "[checkpoint][save_folder]") {
  TemporaryFolder folder;
  for (const std::string name : {".step-1.fsdp-saving-00", ".step-2.fsdp-removed-00", ".step-7.fsdp-old-00", ".other.fsdp-saving-00",
                                 ".step-x.fsdp-saving-00"})
    fs::create_directory(folder / name);
  write_bytes(folder / ".step-1.fsdp-lock", "");
  SaveFolder under_way(folder / "step-5");
  save_checkpoint_parts(folder / "step-3", parts(1));
  CHECK(folder.names() == Names{"step-3", ".other.fsdp-saving-00", ".step-x.fsdp-saving-00", ".step-5.fsdp-lock",
                                fs::path(under_way.folder()).filename()});
}

TEST_CASE("a save killed between two renames is read, and put back by the next", "[checkpoint][save_folder]") {
  TemporaryFolder folder;
  save_checkpoint_parts(folder / "c", parts(5));
  fs::rename(folder / "c", folder / ".c.fsdp-old-00");
  CHECK(saved_value(folder / "c") == 5);
  CHECK(folder.names() == Names{".c.fsdp-old-00"});
  { SaveFolder begun(folder / "c"); }
  CHECK(folder.names() == Names{"c"});
  CHECK(saved_value(folder / "c") == 5);
}

TEST_CASE("the last checkpoints of a series are kept, by number", "[checkpoint][save_folder]") {
  TemporaryFolder folder;
  fs::create_directory(folder / "step-1");
  write_bytes(folder / "step-1/notes", "");
  for (const std::string name : {"step-2", "step-9", "step-10", "best-3"}) save_checkpoint_parts(folder / name, parts(1));
  save_checkpoint_parts(folder / "step-11", parts(1), {.keep_last = 2});
  CHECK(folder.names() == Names{"step-1", "step-10", "step-11", "best-3"});
  save_checkpoint_parts(folder / "step-4", parts(1), {.keep_last = 1});
  CHECK(folder.names() == Names{"step-1", "step-4", "best-3"});
  CHECK_THAT(error_of<UsageError>([&] { save_checkpoint_parts(folder / "c", parts(1), {.keep_last = 1}); }), Contains("number"));
}

TEST_CASE("the latest checkpoint is the one with the largest number that is whole", "[checkpoint][save_folder]") {
  TemporaryFolder folder;
  CHECK(latest_checkpoint(folder / "none") == std::nullopt);
  CHECK(latest_checkpoint(folder.path()) == std::nullopt);
  save_checkpoint_parts(folder / "step-9", parts(1));
  save_checkpoint_parts(folder / "step-10", parts(1));
  fs::create_directory(folder / "step-11");
  fs::copy(folder / "step-10", folder / ".step-12.fsdp-saving-00");
  CHECK(latest_checkpoint(folder.path()) == folder / "step-10");
  fs::rename(folder / "step-10", folder / ".step-10.fsdp-old-00");
  CHECK(latest_checkpoint(folder.path()) == folder / "step-10");
  CHECK(saved_value(folder / "step-10") == 1);
}

TEST_CASE("what another save's lock keeps is left alone, and the save is good", "[checkpoint][save_folder]") {
  TemporaryFolder folder;
  for (const std::string name : {"step-1", "step-2"}) save_checkpoint_parts(folder / name, parts(1));
  fs::create_directory(folder / ".step-1.fsdp-lock");  // a file that cannot be opened to write, for root too
  fs::create_directory(folder / ".step-1.fsdp-saving-00");
  save_checkpoint_parts(folder / "step-3", parts(3), {.keep_last = 1});
  CHECK(saved_value(folder / "step-3") == 3);
  CHECK(folder.names() == Names{"step-1", "step-3", ".step-1.fsdp-lock", ".step-1.fsdp-saving-00"});
}

}  // namespace
}  // namespace fsdp::test
