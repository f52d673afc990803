#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>

#include <ATen/Parallel.h>

int main(int argc, char** argv) {
  at::set_num_threads(1);  // ranks are threads already
  return Catch::Session().run(argc, argv);
}
