// Uses just enough of the library to be compiled, linked and run in a moment.
#include <fsdp/process_group.hpp>

#include <cstdio>

int main() {
  const auto world = fsdp::single_rank();
  std::printf("a world of %d\n", world->size());
  return world->size() == 1 ? 0 : 1;
}
