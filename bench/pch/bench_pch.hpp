// What nearly every file of fsdp_bench includes. The library's own headers stay out: they change more often.
#include <nlohmann/json.hpp>
#include <torch/torch.h>
