// What every test of the mesh and tensor layers includes.
#include <torch/torch.h>

#include <catch2/catch.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <random>
#include <string>
#include <vector>

#include <fsdp/fsdp.hpp>
