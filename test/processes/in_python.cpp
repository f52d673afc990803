// A library for test_in_python.py to load into a Python process, where the autograd engine is Python's.

#include <fsdp/fsdp.hpp>
#include <torch/torch.h>

extern "C" {

/// Trains nothing: compares the gradients of a checkpointed function with the plain one's, and counts
/// how often the function ran. 0: all is well; 1: gradients differ; 2: it was not recomputed once.
int fsdp_test_checkpoint() {
  auto layer = torch::nn::Linear(6, 6);
  const auto x = torch::randn({4, 6}).requires_grad_();
  int runs = 0;
  auto function = [&](const at::Tensor& in) {
    ++runs;
    return torch::dropout(torch::tanh(layer->forward(torch::sin(in))), 0.5, true);
  };
  auto gradients = [&](bool with_checkpoint) {
    torch::manual_seed(3);
    const auto y = with_checkpoint ? fsdp::activation_checkpoint(function, x) : function(x);
    return torch::autograd::grad({y.square().sum()}, {x, layer->weight});
  };
  const auto expected = gradients(false);
  runs = 0;
  const auto found = gradients(true);
  if (!at::equal(found[0], expected[0]) || !at::equal(found[1], expected[1])) return 1;
  return runs == 2 ? 0 : 2;
}

}  // extern "C"
