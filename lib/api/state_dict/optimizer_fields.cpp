#include "api/state_dict/optimizer_fields.hpp"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "base/require.hpp"

namespace fsdp {

namespace {

using namespace torch::optim;

template <class State>
StateFields adam_fields(State& state) {
  return {{{"exp_avg", &state.exp_avg()},
           {"exp_avg_sq", &state.exp_avg_sq()},
           {"max_exp_avg_sq", &state.max_exp_avg_sq()}},
          &state.step()};
}

template <class Options>
OptionFields adam_fields(const char* name, Options& options) {
  return {name,
          {{"lr", &options.lr()},
           {"betas", &options.betas()},
           {"eps", &options.eps()},
           {"weight_decay", &options.weight_decay()},
           {"amsgrad", &options.amsgrad()}}};
}

}  // namespace

std::optional<StateFields> fields_of(OptimizerParamState& state) {
  if (auto* adamw = dynamic_cast<AdamWParamState*>(&state)) return adam_fields(*adamw);
  if (auto* adam = dynamic_cast<AdamParamState*>(&state)) return adam_fields(*adam);
  if (auto* sgd = dynamic_cast<SGDParamState*>(&state))
    return StateFields{{{"momentum_buffer", &sgd->momentum_buffer()}}, nullptr};
  if (auto* adagrad = dynamic_cast<AdagradParamState*>(&state))
    return StateFields{{{"sum", &adagrad->sum()}}, &adagrad->step()};
  if (auto* rmsprop = dynamic_cast<RMSpropParamState*>(&state))
    return StateFields{{{"square_avg", &rmsprop->square_avg()},
                        {"momentum_buffer", &rmsprop->momentum_buffer()},
                        {"grad_avg", &rmsprop->grad_avg()}},
                       &rmsprop->step()};
  return std::nullopt;
}

std::optional<OptionFields> fields_of(OptimizerOptions& options) {
  if (auto* adamw = dynamic_cast<AdamWOptions*>(&options)) return adam_fields("AdamW", *adamw);
  if (auto* adam = dynamic_cast<AdamOptions*>(&options)) return adam_fields("Adam", *adam);
  if (auto* sgd = dynamic_cast<SGDOptions*>(&options))
    return OptionFields{"SGD",
                        {{"lr", &sgd->lr()},
                         {"momentum", &sgd->momentum()},
                         {"dampening", &sgd->dampening()},
                         {"weight_decay", &sgd->weight_decay()},
                         {"nesterov", &sgd->nesterov()}}};
  if (auto* adagrad = dynamic_cast<AdagradOptions*>(&options))
    return OptionFields{"Adagrad",
                        {{"lr", &adagrad->lr()},
                         {"lr_decay", &adagrad->lr_decay()},
                         {"weight_decay", &adagrad->weight_decay()},
                         {"initial_accumulator_value", &adagrad->initial_accumulator_value()},
                         {"eps", &adagrad->eps()}}};
  if (auto* rmsprop = dynamic_cast<RMSpropOptions*>(&options))
    return OptionFields{"RMSprop",
                        {{"lr", &rmsprop->lr()},
                         {"alpha", &rmsprop->alpha()},
                         {"eps", &rmsprop->eps()},
                         {"weight_decay", &rmsprop->weight_decay()},
                         {"momentum", &rmsprop->momentum()},
                         {"centered", &rmsprop->centered()}}};
  return std::nullopt;
}

std::unique_ptr<OptimizerParamState> new_state(const std::string& optimizer) {
  if (optimizer == "AdamW") return std::make_unique<AdamWParamState>();
  if (optimizer == "Adam") return std::make_unique<AdamParamState>();
  if (optimizer == "SGD") return std::make_unique<SGDParamState>();
  if (optimizer == "Adagrad") return std::make_unique<AdagradParamState>();
  require(optimizer == "RMSprop", "expected one of {}, found {}", kKnownOptimizers, optimizer);
  return std::make_unique<RMSpropParamState>();
}

}  // namespace fsdp
