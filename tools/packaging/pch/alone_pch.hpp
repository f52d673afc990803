// Most of the time of compiling a header alone is LibTorch's.
#include <torch/torch.h>
