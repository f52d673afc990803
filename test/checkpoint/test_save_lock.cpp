#include "checkpoint/io/save_lock.hpp"

#include <catch2/catch.hpp>

#include "fsdp/error.hpp"
#include "fsdp/fsdp.hpp"
#include "support/error_of.hpp"
#include "temporary_folder.hpp"

namespace fsdp::test {
namespace {

using Names = std::set<std::string>;

TEST_CASE("one save at a time has the lock of a checkpoint", "[checkpoint][save_lock]") {
  TemporaryFolder folder;
  auto first = SaveLock::take(folder.path(), "c");
  CHECK(first != nullptr);
  CHECK(folder.names() == Names{".c.fsdp-lock"});
  CHECK(SaveLock::take(folder.path(), "c") == nullptr);
  CHECK(SaveLock::take(folder.path(), "d") != nullptr);
  first.reset();
  CHECK(folder.names().empty());
  CHECK(SaveLock::take(folder.path(), "c") != nullptr);
}

TEST_CASE("the lock file of a save that was killed hinders nobody", "[checkpoint][save_lock]") {
  TemporaryFolder folder;
  write_bytes(folder / ".c.fsdp-lock", "");
  CHECK(SaveLock::take(folder.path(), "c") != nullptr);
  CHECK(folder.names().empty());
}

TEST_CASE("a lock that cannot be made is an error that names it", "[checkpoint][save_lock]") {
  TemporaryFolder folder;
  CHECK_THAT(error_of<CheckpointError>([&] { SaveLock::take(folder / "none", "c"); }),
             Catch::Contains(folder / "none/.c.fsdp-lock") && Catch::Contains("cannot be made"));
}

}  // namespace
}  // namespace fsdp::test
