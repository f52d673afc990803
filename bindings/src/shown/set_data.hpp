#pragma once

namespace fsdp::python {

/// From now on `.data = x` of a parameter's DTensor, or of its gradient's, is taken over. LibTorch's own would exchange the
/// wrapper alone, and lose the values.
void take_over_set_data();

}  // namespace fsdp::python
