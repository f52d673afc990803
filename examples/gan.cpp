// Two sharded models that train in turns. While the generator trains, the discriminator is frozen: its weights are used, no
// gradient of them is computed, and nothing is reduced for it.
//
//   torchrun --nproc-per-node 2 --no-python build/examples/gan
#include <cstdio>
#include <fsdp/fsdp.hpp>
#include <torch/torch.h>

namespace {

constexpr int64_t kNoise = 8, kRows = 64;

torch::nn::Sequential layers(int64_t in, int64_t out) {
  return torch::nn::Sequential(torch::nn::Linear(in, 64), torch::nn::LeakyReLU(), torch::nn::Linear(64, 64),
                               torch::nn::LeakyReLU(), torch::nn::Linear(64, out));
}

void set_trainable(torch::nn::Sequential& model, bool is_trainable) {
  for (auto& parameter : model->parameters()) parameter.set_requires_grad(is_trainable);
}

torch::Tensor loss_of(const torch::Tensor& logits, double label) {
  return torch::binary_cross_entropy_with_logits(logits, torch::full_like(logits, label));
}

/// Points of a circle, which the generator is to learn.
torch::Tensor real_points() {
  const auto angle = 2 * M_PI * torch::rand({kRows});
  return torch::stack({angle.cos(), angle.sin()}, 1);
}

}  // namespace

int main() {
  const auto world = fsdp::init_process_group();
  torch::manual_seed(1);
  auto generator = layers(kNoise, 2), discriminator = layers(2, 1);
  for (auto* model : {&generator, &discriminator}) fsdp::fully_shard(*model, fsdp::wrap_class<torch::nn::LinearImpl>());
  torch::optim::Adam generator_optimizer(generator->parameters(), torch::optim::AdamOptions(2e-3));
  torch::optim::Adam discriminator_optimizer(discriminator->parameters(), torch::optim::AdamOptions(2e-3));
  torch::manual_seed(2 + world->rank());

  double error = 0;
  for (int step = 0; step < 60; ++step) {
    set_trainable(discriminator, true);
    const auto made = [&] {
      torch::NoGradGuard no_grad;
      return generator->forward(torch::randn({kRows, kNoise}));
    }();
    const auto told_apart =
        loss_of(discriminator->forward(real_points()), 1) + loss_of(discriminator->forward(made), 0);
    discriminator_optimizer.zero_grad();
    told_apart.backward();
    discriminator_optimizer.step();

    set_trainable(discriminator, false);
    const auto points = generator->forward(torch::randn({kRows, kNoise}));
    const auto believed = loss_of(discriminator->forward(points), 1);
    generator_optimizer.zero_grad();
    believed.backward();
    generator_optimizer.step();
    error = (points.norm(2, 1) - 1).abs().mean().item<double>();
  }
  std::printf("rank %d: the points are %.3f away from the circle\n", world->rank(), error);
  return error < 0.9 ? 0 : 1;
}
