#include <fmt/format.h>
#include <torch/torch.h>
