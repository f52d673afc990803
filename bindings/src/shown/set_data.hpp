#pragma once

namespace fsdp::python {

/// Makes the library take over `.data = x` of a parameter's DTensor, or of its gradient's, from now on. LibTorch's own would
/// exchange the wrapper alone, and lose the values.
void take_over_set_data();

}  // namespace fsdp::python
