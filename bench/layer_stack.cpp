#include "layer_stack.hpp"

namespace fsdp::bench {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Any operator on it will do: the group is there when it returns.
void read(const at::Tensor& weight) { weight.flatten().narrow(0, 0, 1).sum(); }

struct Occupy : torch::autograd::Function<Occupy> {
  struct Times {
    Machine* machine;
    size_t layer;
    double forward_us, backward_us;
  };

  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, at::TensorList weights,
                            const Times& times) {
    context->saved_data["machine"] = reinterpret_cast<int64_t>(times.machine);
    context->saved_data["layer"] = static_cast<int64_t>(times.layer);
    context->saved_data["backward_us"] = times.backward_us;
    context->save_for_backward(weights.vec());
    {
      // Custom functions run without autograd; a step begins with an operator that records.
      const at::AutoGradMode records(true);
      read(weights[0]);
    }
    times.machine->compute(times.layer, /*is_backward=*/false, times.forward_us);
    return x.clone();
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto weights = context->get_saved_variables();
    read(weights[0]);
    auto& machine = *reinterpret_cast<Machine*>(context->saved_data["machine"].toInt());
    machine.compute(static_cast<size_t>(context->saved_data["layer"].toInt()), /*is_backward=*/true,
                    context->saved_data["backward_us"].toDouble());
    variable_list results{gradients[0]};
    for (const auto& weight : weights)
      results.push_back(at::zeros(weight.sizes(), at::device(weight.device()).dtype(weight.scalar_type())));
    results.emplace_back();  // of the times
    return results;
  }
};

ReshardAfterForward reshard_of(const nlohmann::json& value) {
  if (value.is_null()) return {};
  if (value.is_boolean()) return value.get<bool>();
  return value.get<int64_t>();
}

}  // namespace

Machine::Machine(Time time, c10::Device device)
    : time_(time), clock_(time == Time::kVirtual ? virtual_clock() : real_clock()), device_(device) {
  if (!device.is_cpu()) spin_.emplace(device);
}

void Machine::compute(size_t layer, bool is_backward, double us) {
  const int64_t begin = clock_->now_ns();
  occupy(us);
  if (!spin_) slices_.push_back({layer, is_backward, begin, clock_->now_ns()});
}

void Machine::occupy(double us) {
  if (spin_) return (*spin_)(us);
  const auto end = clock_->now_ns() + static_cast<int64_t>(1e3 * us);
  if (time_ != Time::kReal) clock_->wait_until(end);
  while (clock_->now_ns() < end) {
  }
}

TimedLayerImpl::TimedLayerImpl(const nlohmann::json& about, size_t index, Machine& machine)
    : index_(index), forward_us_(about.at("forward_us")), backward_us_(about.at("backward_us")), machine_(&machine) {
  for (const auto& sizes : about.at("params"))
    weights_.push_back(register_parameter("weight" + std::to_string(weights_.size()),
                                          torch::zeros(sizes.get<std::vector<int64_t>>(), machine.device())));
}

at::Tensor TimedLayerImpl::forward(const at::Tensor& x) {
  return Occupy::apply(x, at::TensorList(weights_), Occupy::Times{machine_, index_, forward_us_, backward_us_});
}

Sharding::Sharding(const nlohmann::json& request)
    : reshard(reshard_of(request.at("reshard"))),
      prefetch_distance(request.at("prefetch")),
      separates_reductions(request.at("separate")),
      reduce_buffers(request.at("reduce_buffers")),
      is_flat(request.value("flat", false)),
      is_mixed(request.at("mixed")) {
  if (!request.at("budget").is_null()) byte_budget = request.at("budget").get<int64_t>();
}

LayerStackImpl::LayerStackImpl(const nlohmann::json& layers, const Sharding& sharding, const DeviceMesh& mesh,
                               Machine& machine) {
  FullyShardOptions options{.mesh = mesh, .warn_after_unused_gradients = 0};
  if (sharding.is_flat) options.layout = ParamLayout::kFlat;
  if (sharding.is_mixed) options.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  for (const auto& about : layers) {
    TimedLayer layer(about, layers_->size(), machine);
    options.reshard_after_forward = about.contains("reshard") ? reshard_of(about.at("reshard")) : sharding.reshard;
    fully_shard(layer, options);
    layers_->push_back(layer);
  }
  register_module("layers", layers_);
  options.reshard_after_forward = {};
  auto root = fully_shard(*this, options);
  root.set_prefetch_distance(sharding.prefetch_distance);
  root.set_unsharded_byte_budget(sharding.byte_budget);
  root.set_reduce_scatter_max_input_buffers(sharding.reduce_buffers);
  if (sharding.separates_reductions) root.set_separate_reduce_scatter_group();
}

at::Tensor LayerStackImpl::forward(at::Tensor x) {
  for (const auto& layer : *layers_) x = layer->as<TimedLayer>()->forward(x);
  return x;
}

}  // namespace fsdp::bench
