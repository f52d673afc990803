#include <catch2/catch.hpp>

#include "support/sample.hpp"
#include "support/tensor_parallel_model.hpp"

// What saves, copies, makes and shows parameters, where tensor parallelism has cut them too.

namespace fsdp::test {
namespace {

namespace nn = torch::nn;
using at::Tensor;

TEST_CASE("state dicts hold the whole tensors and load into any mesh", "[runtime][tensor_parallel]") {
  const std::vector<TpCase> cases{{.shape = {2, 2}, .hidden = 7}, {.shape = {4, 1}, .hidden = 7}, {.shape = {1, 4}, .hidden = 7},
                                  {.shape = {2, 2}, .hidden = 7, .says = Says::kMesh, .dim = 1},
                                  {.shape = {2, 1, 2}, .hidden = 7, .is_merged = true}};
  Sample sample(2);
  for (const auto& from : cases)
    for (const auto& to : cases)
      if (sample.takes_next()) CHECK(on_ranks(4, [&](Rank& rank) {
        TpModel one(rank, from), two(rank, to, 5);
        one.shard(from);
        two.shard(to);
        const auto full = state_dict(one.model);
        for (const auto& item : full.entries)
          rank.check_identical(item.value().value, one.plain->named_parameters()[item.key()].detach(), "full: " + item.key());
        load_state_dict(two.model, full);
        check_weights(rank, two.model, one.plain, "from a full dict: ");
        load_state_dict(two.model, state_dict(two.plain));
        check_weights(rank, two.model, two.plain, "from a plain module's dict: ");
        const auto sharded_dict = state_dict(one.model, {.kind = StateDictKind::kSharded});
        for (const auto& item : sharded_dict.entries) {
          rank.check(item.value().dtensor.mesh() == dtensor_of(one.model->named_parameters()[item.key()]).mesh(), "mesh of an entry");
          rank.check(item.value().sizes == one.plain->named_parameters()[item.key()].sizes().vec(), "sizes of an entry");
        }
        load_state_dict(two.model, sharded_dict);
        check_weights(rank, two.model, one.plain, "from a sharded dict: ");
        const auto first = state_dict(two.model, {.rank0_only = true});
        rank.check_equal(first.entries.size(), rank.index() == 0 ? full.entries.size() : size_t{0}, "rank 0 only");
        load_state_dict(one.model, state_dict(one.plain));
        load_state_dict(one.model, first, {.broadcast_from_rank0 = true});
        check_weights(rank, one.model, one.plain, "from the first rank's dict: ");
      }));
}

TEST_CASE("an optimizer's state is saved for whole tensors and loads back", "[runtime][tensor_parallel]") {
  const TpCase c{.shape = {2, 2}, .hidden = 7};
  on_ranks(4, [&](Rank& rank) {
    TpModel one(rank, c), two(rank, {.shape = {4, 1}, .hidden = 7}, 21);
    one.shard(c);
    two.shard({.shape = {4, 1}, .hidden = 7});
    torch::optim::AdamW optimizer(one.model->parameters(), 1e-2), other(two.model->parameters(), 1e-2), plain(one.plain->parameters(), 1e-2);
    plain_backward(one.plain, 2, 0);
    one.model->loss(one.batch, 0).backward();
    optimizer.step();
    plain.step();
    const auto dict = optimizer_state_dict(*one.model, optimizer), expected = optimizer_state_dict(*one.plain, plain);
    for (const auto& [name, state] : expected.state)
      for (const auto& [field, entry] : state.tensors)
        rank.check_close(dict.state.at(name).tensors.at(field).value, entry.value, name + " " + field);
    load_optimizer_state_dict(*two.model, other, dict);
    const auto again = optimizer_state_dict(*two.model, other);
    for (const auto& [name, state] : dict.state)
      for (const auto& [field, entry] : state.tensors)
        rank.check_identical(again.state.at(name).tensors.at(field).value, entry.value, "loaded: " + name + " " + field);
  });
}

TEST_CASE("sync_from_rank0 keeps each tensor-parallel rank's own values", "[runtime][tensor_parallel]") {
  on_ranks(6, [](Rank& rank) {
    const TpCase c{.shape = {3, 2}, .hidden = 7};
    // Other values on every data-parallel rank; the first one's are wanted.
    TpModel first(rank, c, 30), tp(rank, c, 30 + static_cast<uint64_t>(rank.index() / 2));
    auto options = tp.options(c);
    options.sync_from_rank0 = true;
    tp.shard(c, options);
    check_weights(rank, tp.model, first.plain, "synchronised: ");
  });
}

TEST_CASE("full parameters, clones and conversions work on the local tensors", "[runtime][tensor_parallel]") {
  on_ranks(4, [](Rank& rank) {
    const TpCase c{.shape = {2, 2}, .hidden = 7};
    TpModel tp(rank, c);
    tp.shard(c);
    tp.model->loss(tp.batch, 0).backward();
    auto copy = seeded(3, [&] { return TpNet(fsdp::clone(tp.model)); });
    check_weights(rank, copy, tp.plain, "clone: ");
    copy->loss(tp.batch, 0).backward();
    plain_backward(tp.plain, 2, 0);
    for (const auto& param : copy->named_parameters())
      rank.check_close(full_grad(param.value()), tp.plain->named_parameters()[param.key()].grad(), "gradient of the clone: " + param.key());
    {
      FullParameters scope(copy);
      at::NoGradGuard no_grad;
      for (const auto& param : copy->named_parameters()) {
        rank.check_identical(param.value().detach(), tp.local_of(param.key(), tp.plain->named_parameters()[param.key()].detach()), "shown: " + param.key());
        param.value().mul_(2);
      }
    }
    at::NoGradGuard no_grad;
    for (auto& param : tp.plain->parameters()) param.mul_(2);
    check_weights(rank, copy, tp.plain, "written back: ");
    fsdp::to(*copy, at::kDouble);
    for (const auto& param : copy->named_parameters())
      rank.check_close(full_tensor(param.value()).to(at::kFloat), tp.plain->named_parameters()[param.key()].detach(), "in double: " + param.key());
  });
}

TEST_CASE("materialize gives the parts the values that the plain module gets", "[runtime][tensor_parallel]") {
  for (const auto& c : std::vector<TpCase>{{.shape = {2, 2}, .hidden = 7}, {.shape = {2, 2}, .hidden = 7, .layout = ParamLayout::kFlat}})
    on_ranks(4, [&](Rank& rank) {
      TpModel tp(rank, c);
      {
        MetaDevice meta;
        tp.model = TpNet(c.width, c.hidden, tp.tp.get_group().get());
      }
      const InitOptions init{.seed = 9, .initializers = {
          initializer<TpMlpImpl>([](TpMlpImpl& mlp, Initializer& init) { init.uniform_(mlp.bias, -1, 1); }),
          initializer<TpNetImpl>([](TpNetImpl& net, Initializer& init) { init.constant_(net.scale, 2); }),
      }};
      tp.shard(c);
      materialize(tp.model, init);
      init_parameters(tp.plain, init);
      for (const auto& param : tp.model->named_parameters())
        rank.check_close(full_tensor(param.value()), tp.plain->named_parameters()[param.key()].detach(), param.key(), 1e-6);
    });
}

}  // namespace
}  // namespace fsdp::test
