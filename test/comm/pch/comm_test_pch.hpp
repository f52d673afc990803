// What every test of the layers base and comm includes.
#include <ATen/ATen.h>

#include <catch2/catch.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>
