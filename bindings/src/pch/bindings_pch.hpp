// What every source of the extension includes anyway.
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/nn/module.h>
