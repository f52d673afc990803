// Uses just enough of the library to be compiled, linked and run in a moment.
#include <fsdp/process_group.hpp>
#include <fsdp/version.hpp>

#include <cstdio>

int main() {
  const auto world = fsdp::single_rank();
  std::printf("a world of %d, by libfsdp %s with the headers of %d.%d.%d\n", world->size(), fsdp::version(),
              FSDP_VERSION_MAJOR, FSDP_VERSION_MINOR, FSDP_VERSION_PATCH);
  return world->size() == 1 ? 0 : 1;
}
