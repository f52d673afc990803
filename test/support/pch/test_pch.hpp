// What nearly every test includes, compiled once for all test programs (meson.build). Nothing of this project.
// LibTorch's logging defines CHECK for itself if it is included after Catch2.
#include <c10/util/Logging.h>
#undef CHECK

#include <catch2/catch.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>
