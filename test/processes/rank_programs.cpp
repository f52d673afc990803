// The programs that the modules here start as ranks, in one file: `fsdp_test_ranks NAME ARGUMENTS`.
#include <cstdio>
#include <cstring>

namespace fsdp::test {

namespace rank_failure { int run(int argc, char** argv); }
namespace rank_disagreement { int run(int argc, char** argv); }
namespace libtorch_init { int run(int argc, char** argv); }
namespace optimizer_save { int run(int argc, char** argv); }
namespace fsdp1_rows { int run(int argc, char** argv); }
namespace fsdp2_mixed { int run(int argc, char** argv); }
namespace network_faults { int run(int argc, char** argv); }

}  // namespace fsdp::test

int main(int argc, char** argv) {
  using namespace fsdp::test;
  const struct {
    const char* name;
    int (*run)(int, char**);
  } programs[] = {{"rank_failure", rank_failure::run},   {"rank_disagreement", rank_disagreement::run},
                  {"libtorch_init", libtorch_init::run}, {"optimizer_save", optimizer_save::run},
                  {"fsdp1_rows", fsdp1_rows::run},       {"fsdp2_mixed", fsdp2_mixed::run},
                  {"network_faults", network_faults::run}};
  for (const auto& program : programs)
    if (argc > 1 && std::strcmp(argv[1], program.name) == 0) return program.run(argc - 1, argv + 1);
  std::fprintf(stderr, "fsdp_test_ranks: there is no program %s\n", argc > 1 ? argv[1] : "without a name");
  return 2;
}
