#include "trainer.hpp"

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <numbers>

namespace llama {
namespace {

/// Tokens to read and, one byte further on, tokens to predict.
struct Batch {
  torch::Tensor inputs, targets;
};

/// One row of `context` + 1 bytes from each of `starts`.
Batch gather_rows(const std::string& text, const std::vector<int64_t>& starts, int64_t context,
                  torch::Device device) {
  const auto rows = static_cast<int64_t>(starts.size());
  const auto tokens = torch::empty({rows, context + 1}, torch::kLong);
  auto* out = tokens.data_ptr<int64_t>();
  for (const int64_t start : starts)
    for (int64_t i = 0; i <= context; ++i)
      *out++ = static_cast<unsigned char>(text[static_cast<size_t>(start + i)]);
  const auto moved = tokens.to(device);
  return {moved.narrow(1, 0, context), moved.narrow(1, 1, context).contiguous()};
}

torch::Tensor loss_of(const torch::Tensor& logits, const torch::Tensor& targets) {
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten());
}

torch::optim::AdamW make_optimizer(const LanguageModel& model, const TrainingOptions& options) {
  std::vector<torch::Tensor> matrices, vectors;
  for (const auto& parameter : model->parameters())
    (parameter.dim() > 1 ? matrices : vectors).push_back(parameter);
  const auto settings = torch::optim::AdamWOptions(options.learning_rate).betas({0.9, 0.95});
  const auto with_decay = [&](double decay) {
    auto copy = settings;
    return std::make_unique<torch::optim::AdamWOptions>(copy.weight_decay(decay));
  };
  return torch::optim::AdamW(
      {{matrices, with_decay(options.weight_decay)}, {vectors, with_decay(0.0)}}, settings);
}

/// Rises over the warm-up, then falls to a tenth along half a cosine.
double learning_rate(const TrainingOptions& options, int64_t step) {
  const auto done = static_cast<double>(step + 1);
  if (step < options.warmup)
    return options.learning_rate * done / static_cast<double>(options.warmup);
  const double left = static_cast<double>(options.steps - step) /
                      static_cast<double>(std::max<int64_t>(options.steps - options.warmup, 1));
  return options.learning_rate * (0.55 - 0.45 * std::cos(std::numbers::pi * left));
}

void set_learning_rate(torch::optim::AdamW& optimizer, double rate) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(rate);
}

}  // namespace

TrainingResult train(LanguageModel& model, Execution& execution, const Corpus& corpus,
                     const TrainingOptions& options, Checkpoints& checkpoints, Progress& progress) {
  const int64_t context = model->config().context;
  const RowSampler sampler{options.seed, options.global_batch, context + 1};
  const int64_t rows = options.global_batch / execution.ranks();
  auto optimizer = make_optimizer(model, options);
  checkpoints.resume(model, optimizer);
  const int64_t first = checkpoints.start().step;
  TrainingResult result{.losses = checkpoints.start().losses};
  const auto begin = std::chrono::steady_clock::now();

  for (int64_t step = first; step < options.steps; ++step) {
    execution.begin_step(step - first);
    std::vector<int64_t> starts;
    for (int64_t row = rows * execution.rank(); row < rows * (execution.rank() + 1); ++row)
      starts.push_back(sampler.start(step, row, static_cast<int64_t>(corpus.training.size())));
    const auto batch = gather_rows(corpus.training, starts, context, execution.device());

    const auto loss = loss_of(model->forward(batch.inputs), batch.targets);
    optimizer.zero_grad();
    loss.backward();
    execution.clip_gradients(options.clip);
    set_learning_rate(optimizer, learning_rate(options, step));
    optimizer.step();

    result.losses.push_back(execution.mean_over_ranks(loss.item<double>(), "loss"));
    if (!std::isfinite(result.losses.back()))
      throw std::runtime_error(fmt::format(
          "the loss of step {} is {}; try a smaller --learning-rate", step, result.losses.back()));
    checkpoints.save_if_due(model, optimizer, result.losses);
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    const double step_s = elapsed.count() / static_cast<double>(step + 1 - first);
    result.tokens_per_second = static_cast<double>(options.global_batch * context) / step_s;
    progress.show({step + 1, options.steps, result.losses.back(), result.tokens_per_second,
                   step_s * static_cast<double>(options.steps - step - 1), execution.held_bytes()});
  }
  checkpoints.finish();
  return result;
}

double held_out_bits_per_byte(Execution& execution, const ModelConfig& model, const Corpus& corpus,
                              const Options& options) {
  const auto text_bytes = static_cast<int64_t>(corpus.held_out.size());
  const int64_t ranks = execution.ranks();
  // Every rank scores the same number of rows at a time, as a forward is something all do together.
  const int64_t rows_at_once = options.training.global_batch;
  const int64_t wanted = std::min(options.data.eval_bytes, text_bytes - 1) / model.context;
  const int64_t rounds = std::max<int64_t>(wanted / rows_at_once, 1);
  const int64_t stride = (text_bytes - model.context - 1) / (rounds * rows_at_once);
  double nats = 0;
  for (int64_t round = 0; round < rounds; ++round) {
    std::vector<int64_t> starts;
    for (int64_t row = execution.rank(); row < rows_at_once; row += ranks)
      starts.push_back((round * rows_at_once + row) * stride);
    const auto batch = gather_rows(corpus.held_out, starts, model.context, execution.device());
    nats += loss_of(execution.predict(batch.inputs), batch.targets).item<double>();
  }
  const double mean =
      execution.mean_over_ranks(nats / static_cast<double>(rounds), "held-out loss");
  return mean / std::numbers::ln2;
}

}  // namespace llama
