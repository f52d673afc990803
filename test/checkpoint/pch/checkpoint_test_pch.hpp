// What every test of the layer checkpoint includes. LibTorch first: it has a CHECK of its own, which Catch2 replaces.
#include <torch/torch.h>

#include <catch2/catch.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <vector>

#include <fsdp/fsdp.hpp>
