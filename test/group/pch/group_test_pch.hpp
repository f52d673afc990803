// What nearly every test of this folder includes.
#include <torch/torch.h>

#include <catch2/catch.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <fsdp/fsdp.hpp>
#include <memory>
#include <string>
#include <vector>
