#include <catch2/catch.hpp>

#include "support/expert_model.hpp"

// What saves, copies, makes and shows parameters, where some are on a mesh of their own.

namespace fsdp::test {
namespace {

TEST_CASE("sync_from_rank0 gives experts the values of their own mesh's first rank", "[runtime][param_mesh]") {
  for (bool is_even : {true, false}) {
    const EpCase c{.is_even = is_even};
    on_ranks(4, [&](Rank& rank) {
      EpModel ep(rank, c, 100 + static_cast<uint64_t>(rank.index())), dense(rank, c, 100);
      EpModel expert(rank, c, 100 + 2 * static_cast<uint64_t>(ep.expert));
      auto options = ep.options(c);
      options.sync_from_rank0 = true;
      ep.shard(options);
      for (const auto& param : ep.model->named_parameters()) {
        const auto& source = param.key().find("expert") != std::string::npos ? expert : dense;
        rank.check_identical(full_tensor(param.value()), source.model->named_parameters()[param.key()].detach(), param.key());
      }
      rank.check_identical(ep.model->steps, dense.model->steps, "a buffer");
    });
  }
  on_ranks(4, [](Rank& rank) {  // different experts within one mesh
    const EpCase c;
    auto net = seeded(1, [&] { return EpNet(5, std::vector<int64_t>{rank.index() < 3 ? 6 : 7}); });
    EpModel ep(rank, c);
    auto options = ep.options(c);
    options.sync_from_rank0 = true;
    const std::vector<std::string> parts =
        ep.expert == 1 ? std::vector<std::string>{"the ranks' modules differ", "expert"} : std::vector<std::string>{"rank 2 of the mesh"};
    rank.check_throws<UsageError>([&] { fully_shard(*net->blocks[0], options); }, parts, "refused on every rank");
    rank.check(!find_fsdp_module(*net->blocks[0]), "nothing has changed");
  });
}

TEST_CASE("state dicts hold a rank's experts, and load back", "[runtime][param_mesh]") {
  const EpCase c{.is_even = false};
  on_ranks(4, [&](Rank& rank) {
    EpModel ep(rank, c), other(rank, c, 77);
    ep.shard(ep.options(c));
    other.shard(other.options(c));
    const auto full = state_dict(ep.model);
    for (const auto& item : full.entries)
      if (item.key() != "steps")
        rank.check_identical(item.value().value, ep.plain->named_parameters()[plain_name(item.key(), ep.expert)].detach(), item.key());
    load_state_dict(other.model, full);
    const auto parameters = unique_parameters(*ep.model), others = unique_parameters(*other.model);
    for (size_t i = 0; i < parameters.size(); ++i)
      rank.check_identical(others[i].second.detach(), parameters[i].second.detach(), "full: " + parameters[i].first);
    EpModel third(rank, c, 78);
    third.shard(third.options(c));
    load_state_dict(third.model, state_dict(ep.model, {.kind = StateDictKind::kSharded}));
    for (size_t i = 0; i < parameters.size(); ++i)
      rank.check_identical(unique_parameters(*third.model)[i].second.detach(), parameters[i].second.detach(), "sharded");

    const auto first = state_dict(ep.model, {.rank0_only = true});
    const size_t kept = rank.index() == 0 ? full.entries.size() : rank.index() == 2 ? 8 : 0;
    rank.check_equal(first.entries.size(), kept, "the first rank of each mesh keeps what is its own");
    rank.check_throws<UsageError>([&] { load_state_dict(ep.model, first, {.broadcast_from_rank0 = true}); },
                                  {"blocks.0.expert.0.weight", "edp=2"}, "no rank has it for all");
  });
}

TEST_CASE("clones, full parameters, conversions and materialize keep several groups", "[runtime][param_mesh]") {
  const EpCase c{.dim = 1};
  on_ranks(4, [&](Rank& rank) {
    EpModel ep(rank, c);
    ep.shard(ep.options(c));
    ep.model->loss(rank.index(), 0, 0).backward();
    auto copy = seeded(3, [&] { return EpNet(fsdp::clone(ep.model)); });
    rank.check_equal(report(roots(*copy)[0]).groups.size(), size_t{5}, "groups of the copy");
    rank.log().clear();
    copy->loss(rank.index(), 0, 0).backward();
    const auto gathers = rank.subjects_of("all_gather");
    rank.check(std::find(gathers.begin(), gathers.end(), "blocks.0 [edp]") != gathers.end(), "named alike");
    const auto one = unique_parameters(*ep.model), two = unique_parameters(*copy);
    for (size_t i = 0; i < one.size(); ++i) {
      rank.check_identical(two[i].second.grad(), one[i].second.grad(), "gradient in the copy: " + one[i].first);
      rank.check(!to_local(two[i].second).is_alias_of(to_local(one[i].second)), "its own memory");
    }
    {
      FullParameters scope(copy);
      at::NoGradGuard no_grad;
      for (const auto& param : copy->named_parameters()) {
        rank.check_identical(param.value().detach(), ep.plain->named_parameters()[plain_name(param.key(), ep.expert)].detach(),
                             "shown: " + param.key());
        param.value().mul_(2);
      }
    }
    for (size_t i = 0; i < one.size(); ++i)
      rank.check_identical(two[i].second.detach(), one[i].second.detach() * 2, "written back: " + one[i].first);
    fsdp::to(*copy, at::kDouble);
    for (size_t i = 0; i < one.size(); ++i)
      rank.check_identical(two[i].second.detach().to(at::kFloat), one[i].second.detach() * 2, "in double: " + one[i].first);

    auto meta = [&] { MetaDevice on_meta; return EpNet(5, std::vector{c.hidden_of(ep.expert)}); }();
    for (auto& block : *meta->blocks) fully_shard(*block, ep.options(c));
    fully_shard(meta, ep.options(c));
    materialize(meta, {.seed = 5, .initializers = {initializer<EpNetImpl>([](EpNetImpl& net, Initializer& init) {
                         init.constant_(net.steps, 0);
                       })}});
    auto whole = seeded(1, [&] { return EpNet(5, std::vector{c.hidden_of(ep.expert)}); });
    init_parameters(whole, {.seed = 5});
    for (const auto& param : meta->named_parameters())
      rank.check_identical(full_tensor(param.value()), whole->named_parameters()[param.key()].detach(), "materialized: " + param.key());
  });
}

}  // namespace
}  // namespace fsdp::test
