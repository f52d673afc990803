// The table of NCCL's functions: the library's own, and tables that lack some.
#include <fmt/format.h>

#include <catch2/catch.hpp>

#include "comm/nccl/nccl_api.hpp"
#include "fsdp/error.hpp"
#include "nccl_substitute.hpp"

namespace fsdp::test {

TEST_CASE("the functions are those of the NCCL that LibTorch has loaded", "[comm][nccl_api]") {
  const NcclApi& api = nccl_api();
  CHECK(api.version() == fmt::format("{}.{}.{}", NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH));
  CHECK(api.has_memory());
  CHECK(api.has_windows());
  CHECK_THAT(api.describe(ncclSystemError, nullptr), Catch::StartsWith("NCCL " + api.version() + ": unhandled system"));
}

TEST_CASE("functions that only newer versions have are null where they are missing", "[comm][nccl_api]") {
  const NcclSubstitute nccl({.missing_symbol = "ncclCommWindowRegister"});
  CHECK(nccl.api().has_memory());
  CHECK_FALSE(nccl.api().has_windows());
  CHECK(nccl.api().comm_window_register == nullptr);
}

TEST_CASE("a function that is needed and missing is an error with its name and NCCL's version", "[comm][nccl_api]") {
  const NcclSubstitute nccl({.missing_symbol = "ncclReduceScatter"});
  CHECK_THROWS_AS(load_nccl_api(NcclSubstitute::find), CommError);
  CHECK_THROWS_WITH(load_nccl_api(NcclSubstitute::find),
                    Catch::Contains("ncclReduceScatter") &&
                        Catch::Contains(fmt::format("version {}.{}", nccl_test_version() / 10000, nccl_test_version() / 100 % 100)) &&
                        Catch::Contains("c10d_nccl"));
  CHECK_THROWS_WITH(load_nccl_api([](const char*) -> void* { return nullptr; }), Catch::Contains("ncclGetVersion"));
}

}  // namespace fsdp::test
