#include <catch2/catch.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "module/handles.hpp"
#include "module/state/module_state.hpp"
#include "module/state/module_table.hpp"
#include "root/edit/edit_group.hpp"
#include "root/edit/group_conversion.hpp"
#include "support/failing_allocator.hpp"
#include "support/models.hpp"

// Edits of a group: prepared ones have changed nothing, and one that runs out of memory on a rank leaves that rank as it was.

namespace fsdp::test::group_edit {
namespace {

namespace nn = torch::nn;
using at::Tensor;

struct HeadImpl : nn::Module {
  explicit HeadImpl(const Tensor& of) : weight(register_parameter("weight", of)) {}
  Tensor forward(const Tensor& x) { return torch::matmul(x, weight.t()); }
  Tensor weight;
};
TORCH_MODULE(Head);

/// The embedding's weight is the output layer's too.
struct NetImpl : nn::Module {
  NetImpl() {
    embed = register_module("embed", nn::Embedding(7, 6));
    first = register_module("first", nn::Linear(6, 5));
    second = register_module("second", nn::Linear(5, 6));
    head = register_module("head", Head(embed->weight));
  }
  Tensor forward(const Tensor& words) {
    return head->forward(second->forward(torch::tanh(first->forward(embed->forward(words))))).square().mean();
  }
  nn::Embedding embed{nullptr};
  nn::Linear first{nullptr}, second{nullptr};
  Head head{nullptr};
};
TORCH_MODULE(Net);

Tensor words(int rank, int step) { return torch::arange(rank + step, rank + step + 4, at::kLong).remainder(7); }

FullyShardOptions options(const Rank& rank, ParamLayout layout) {
  return {.mesh = rank.mesh(), .mp_policy = {.param_dtype = at::kDouble, .full_precision_in_eval = true}, .layout = layout};
}

/// A model, and an edit of its groups by what users call.
struct Case {
  std::string name;
  std::function<void(Net& net, const Rank& rank, ParamLayout layout)> edit;
  bool is_tied_before = true;  ///< the root is sharded before the edit
};

std::vector<std::shared_ptr<ParamGroup>> groups_of(Net& net) {
  std::vector<std::shared_ptr<ParamGroup>> groups;
  for (const auto& module : net->modules())
    if (const auto state = find_state(*module))
      for (const auto& group : state->live_groups()) groups.push_back(group);
  return groups;
}

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"another dtype", [](Net& net, const Rank&, ParamLayout) { fsdp::to(*net, at::kDouble); }},
      {"its own dtype", [](Net& net, const Rank&, ParamLayout) {
         for (const auto& group : groups_of(net)) compute_in_own_dtype(*group, true);
       }},
      {"local shards", [](Net& net, const Rank&, ParamLayout) { fsdp::local_shards(*net); }},
      {"a tie", [](Net& net, const Rank& rank, ParamLayout layout) { fully_shard(net, options(rank, layout)); }, false},
  };
  return all;
}

Net make(const Rank& rank, const Case& c, ParamLayout layout) {
  auto net = seeded(5, [] { return Net(); });
  fully_shard(net->first, options(rank, layout));
  fully_shard(net->embed, options(rank, layout));
  if (c.is_tied_before) fully_shard(net, options(rank, layout));
  return net;
}

/// A gradient that is reduced, and one that waits.
void leave_gradients(Net& net, const Rank& rank) {
  net->forward(words(rank.index(), 0)).backward();
  fsdp::find_fsdp_module(*net)->set_requires_gradient_sync(false);
  net->forward(words(rank.index(), 1)).backward();
  fsdp::find_fsdp_module(*net)->set_requires_gradient_sync(true);
}

/// What a rank holds.
std::vector<Tensor> state_of(Net& net) {
  const torch::NoGradGuard no_grad;
  std::vector<Tensor> state;
  for (const auto& entry : net->parameters()) {
    const auto param = registered(entry);  // the place of a tie that is not settled shows the member
    state.push_back(is_dtensor(param) ? to_local(param).clone() : param.detach().clone());
    const auto gradient = param.grad();
    state.push_back(!gradient.defined() ? torch::zeros({0}) : is_dtensor(gradient) ? to_local(gradient).clone() : gradient.clone());
  }
  for (const auto& group : groups_of(net)) {
    const auto& parts = group->parts();
    for (const int64_t number : {parts.layout.stored().rank_bytes(), parts.layout.gathered().rank_bytes()})
      state.push_back(torch::full({}, number));
    const auto& store = std::as_const(*group).gradients().store;
    for (size_t i = 0; i < parts.params.size(); ++i)
      for (const auto& sum : {store.accumulated(i), store.partial_sum(i)})
        state.push_back(sum.defined() ? sum.clone() : torch::zeros({0}));
  }
  return state;
}

void check_same(const Rank& rank, const std::vector<Tensor>& found, const std::vector<Tensor>& expected, const std::string& what) {
  rank.check_equal(found.size(), expected.size(), what + ": tensors");
  if (found.size() != expected.size()) return;
  for (size_t i = 0; i < found.size(); ++i) {
    rank.check(found[i].scalar_type() == expected[i].scalar_type(), fmt::format("{}: dtype of tensor {}", what, i));
    rank.check_identical(found[i], expected[i], fmt::format("{}: tensor {}", what, i));
  }
}

std::vector<Tensor> train(Net& net, const Rank& rank, const Case& c, ParamLayout layout) {
  if (!c.is_tied_before && !find_fsdp_module(*net)) fully_shard(net, options(rank, layout));
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (int step = 0; step < 2; ++step) {
    net->forward(words(rank.index(), step + 2)).backward();
    optimizer.step();
    if (step == 0) optimizer.zero_grad();
  }
  return state_of(net);
}

struct Run {
  std::vector<Tensor> trained;
  bool has_failed = false;
};

/// The n-th allocation of the edit fails on rank 1; 0: none does.
Run run(const Rank& rank, const Case& c, ParamLayout layout, int64_t n) {
  auto net = make(rank, c, layout);
  if (c.is_tied_before) leave_gradients(net, rank);
  Run result;
  if (n > 0 && rank.index() == 1) {
    const auto before = state_of(net);
    try {
      const FailingAllocation fails(n);
      try {
        c.edit(net, rank, layout);
      } catch (...) {
        result.has_failed = fails.has_failed();
        throw;
      }
      result.has_failed = fails.has_failed();
    } catch (const std::exception& error) {
      rank.check(message_of(error).find("no memory") != std::string::npos, "what is thrown: " + message_of(error));
      // Of several groups those in front of the one that failed have changed.
      if (!c.is_tied_before) check_same(rank, state_of(net), before, fmt::format("allocation {}: as it was", n));
    }
  }
  if (!(n > 0 && rank.index() == 1) || result.has_failed) c.edit(net, rank, layout);
  result.trained = train(net, rank, c, layout);
  return result;
}

}  // namespace

TEST_CASE("an edit that runs out of memory on one rank leaves it as it was, and the next one and all steps are right",
          "[group][group_edit]") {
  for (const auto& c : cases())
    for (const auto layout : {ParamLayout::kPerParameter, ParamLayout::kFlat}) {
      // A tie that is cut anew is gathered, by all ranks together.
      if (!c.is_tied_before && layout == ParamLayout::kFlat) continue;
      CAPTURE(c.name, layout == ParamLayout::kFlat);
      int64_t failures = 0;
      for (bool fails = true; fails; failures += fails) {
        std::atomic<bool> has_failed = false;
        const bool is_right = on_ranks(2, [&, n = failures + 1](Rank& rank) {
          const auto expected = run(rank, c, layout, 0);
          const auto found = run(rank, c, layout, n);
          if (found.has_failed) has_failed = true;
          check_same(rank, found.trained, expected.trained, fmt::format("{}, allocation {}", c.name, n));
        });
        CHECK(is_right);
        fails = has_failed && is_right;
      }
      CHECK(failures > 0);
    }
}

TEST_CASE("a prepared edit that is dropped has changed nothing", "[group][group_edit]") {
  on_ranks(2, [](Rank& rank) {
    for (const auto layout : {ParamLayout::kPerParameter, ParamLayout::kFlat}) {
      const Case tied{"", {}, true};
      auto net = make(rank, tied, layout);
      leave_gradients(net, rank);
      const auto before = state_of(net);
      for (const auto& group : groups_of(net)) {
        GroupEdit::prepare(*group, {.dtype = at::kDouble});
        GroupEdit::prepare(*group, {.computes_in_own_dtype = true});
        GroupEdit::prepare(*group, {.device = c10::Device(at::kMeta)});
        GroupEdit::prepare(*group, {.leaving = {0}});
      }
      check_same(rank, state_of(net), before, "behind four that are dropped");
      const auto trained = train(net, rank, tied, layout);  // before the other one's backward reduces what waits
      check_same(rank, trained, run(rank, {"", [](auto&&...) {}}, layout, 0).trained, "trained");
    }
  });
}

TEST_CASE("an edit leaves frozen what was frozen before it", "[group][group_edit]") {
  for (const auto& c : cases())
    on_ranks(2, [&](Rank& rank) {
      const auto layout = ParamLayout::kPerParameter;
      auto net = seeded(5, [] { return Net(); });
      // One group gives up the embedding's weight, and goes on with the rest.
      fully_shard({net->first.ptr(), net->embed.ptr()}, options(rank, layout));
      if (c.is_tied_before) fully_shard(net, options(rank, layout));
      const auto bias = [&] { return net->named_parameters()["first.bias"]; };
      bias().set_requires_grad(false);
      c.edit(net, rank, layout);
      rank.check(!bias().requires_grad() && !net->first->bias.requires_grad(), c.name + ": frozen");
      rank.check(net->named_parameters()["first.weight"].requires_grad(), c.name + ": and not the others");
    });
}

TEST_CASE("a change that a group has already is none", "[group][group_edit]") {
  on_ranks(2, [](Rank& rank) {
    auto net = make(rank, {"", {}, true}, ParamLayout::kPerParameter);
    for (const auto& group : groups_of(net)) {
      rank.check(GroupEdit::prepare(*group, {}).is_empty(), "nothing asked for");
      rank.check(GroupEdit::prepare(*group, {.device = c10::Device(at::kCPU), .dtype = at::kFloat}).is_empty(), "as it is");
      rank.check(!GroupEdit::prepare(*group, {.dtype = at::kDouble}).is_empty(), "another dtype");
    }
  });
}

}  // namespace fsdp::test::group_edit
