// What every test of the runtime includes.
#include <torch/torch.h>

#include <catch2/catch.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <fsdp/fsdp.hpp>
