#pragma once

// Comes before everything else in every test (see meson.build): LibTorch's logging defines CHECK for itself if it is
// included after Catch2. And every test has tensors.
#include <ATen/ATen.h>
#include <c10/util/Logging.h>
#undef CHECK
