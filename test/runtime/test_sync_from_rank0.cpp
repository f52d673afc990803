#include <catch2/catch.hpp>

#include "support/models.hpp"

// All ranks start with the first rank's parameters and buffers, and buffers are left alone afterwards.

namespace fsdp::test {
namespace {

namespace nn = torch::nn;
using at::Tensor;

struct NormedNetImpl : nn::Module {
  NormedNetImpl() {
    inner = register_module("inner", nn::Linear(5, 7));
    norm = register_module("norm", nn::BatchNorm1d(7));
    head = register_module("head", nn::Linear(7, 3));
    scale = register_parameter("scale", torch::rand({}));
    head->bias.set_requires_grad(false);
    at::NoGradGuard no_grad;
    norm->running_mean.uniform_();
    norm->running_var.uniform_(1, 2);
  }
  Tensor forward(const Tensor& x) { return head->forward(norm->forward(inner->forward(x))) * scale; }
  nn::Linear inner{nullptr}, head{nullptr};
  nn::BatchNorm1d norm{nullptr};
  Tensor scale;
};
TORCH_MODULE(NormedNet);

/// Other values on every rank.
NormedNet net_of(int rank) {
  return seeded(100 + rank, [] { return NormedNet(); });
}

NormedNet meta_net() {
  MetaDevice meta;
  return NormedNet();
}

void check_values(const Rank& rank, const nn::Module& module, const nn::Module& expected, const std::string& what) {
  const auto found = unique_parameters(module), plain = unique_parameters(expected);
  rank.check_equal(found.size(), plain.size(), what);
  for (size_t i = 0; i < found.size(); ++i) {
    rank.check_identical(dtensor_of(found[i].second).full_tensor().detach(), plain[i].second.detach(), what + ": " + found[i].first);
    rank.check_equal(found[i].second.requires_grad(), plain[i].second.requires_grad(), what + ": requires_grad of " + found[i].first);
  }
  for (const auto& buffer : expected.named_buffers())
    rank.check_identical(module.named_buffers()[buffer.key()], buffer.value(), what + ": " + buffer.key());
}

enum class Others { kReal, kMeta };

void check_sync(Rank& rank, FullyShardOptions options, Others others, const std::string& what) {
  auto first = net_of(0);
  auto net = others == Others::kMeta && rank.index() > 0 ? meta_net() : net_of(rank.index());
  const auto member = net->inner->weight;
  options.sync_from_rank0 = true;
  fully_shard(net->inner, options);
  fully_shard(net, options);
  check_values(rank, *net, *first, what);
  rank.check(member.is_same(net->inner->weight), what + ": the member");
  net->forward(torch::ones({4, 5})).sum().backward();
  first->forward(torch::ones({4, 5})).sum().backward();
  const auto gradient = grad_dtensor_of(net->inner->weight).full_tensor();
  rank.check_close(gradient, first->inner->weight.grad(), what + ": a step");
  rank.check(!net->head->bias.grad().defined(), what + ": frozen");
}

TEST_CASE("all ranks get the first rank's parameters and buffers, whatever they had", "[runtime][sync_from_rank0]") {
  for (const auto others : {Others::kReal, Others::kMeta}) {
    const std::string kind = others == Others::kReal ? "real" : "meta";
    for (int world_size : {1, 2, 3, 5, 8})
      on_ranks(world_size, [&](Rank& rank) { check_sync(rank, {.mesh = rank.mesh()}, others, kind); });
    for (const auto& [replicas, shards] : {std::pair(2, 2), std::pair(3, 2), std::pair(2, 1), std::pair(1, 3)})
      on_ranks(replicas * shards,
               [&](Rank& rank) { check_sync(rank, {.mesh = rank.hybrid(replicas, shards)}, others, kind + ", HSDP"); });
    on_ranks(3, [&](Rank& rank) {
      check_sync(rank, {.mesh = rank.mesh(), .replicate_only = true}, others, kind + ", replicated");
    });
    on_ranks(4, [&](Rank& rank) {
      check_sync(rank, {.mesh = rank.mesh(), .reshard_after_forward = 2}, others, kind + ", integer reshard");
    });
  }
}

TEST_CASE("without the option every rank keeps its own values", "[runtime][sync_from_rank0]") {
  on_ranks(2, [](Rank& rank) {
    auto net = net_of(rank.index());
    const auto own = net->inner->weight.detach().clone();
    rank.log().clear();
    fully_shard(net, {.mesh = rank.mesh()});
    rank.check(rank.calls().empty(), "no communication");
    rank.check_identical(unique_parameters(*net)[1].second.detach(), rows_of(own, rank.index(), 2), "its own rows");
  });
}

TEST_CASE("values go through each shard group from its rank 0, then across replicas", "[runtime][sync_from_rank0]") {
  on_ranks(4, [](Rank& rank) {
    auto net = net_of(rank.index());
    const auto mesh = rank.hybrid(2, 2);
    rank.log().clear();
    fully_shard(net, {.mesh = mesh, .sync_from_rank0 = true});
    std::vector<std::string> groups;
    for (const auto& call : rank.log().calls)
      if (call.operation == "broadcast") groups.push_back(call.group);
    rank.check_equal(groups, std::vector<std::string>{mesh.get_group(1)->name(), mesh.get_group(0)->name()}, "broadcasts of one bucket");
  });
}

TEST_CASE("values travel 250 MiB at a time", "[runtime][sync_from_rank0]") {
  on_ranks(2, [](Rank& rank) {
    constexpr int64_t kBytes = int64_t{130} << 20;
    auto options = at::TensorOptions(at::kByte).device(rank.index() == 0 ? at::kCPU : at::kMeta);
    nn::ParameterDict dict;
    for (const char* name : {"a", "b", "c"})
      dict->insert(name, torch::zeros({name[0] == 'c' ? 10 : kBytes}, options).set_requires_grad(false));
    struct Holder : nn::Module {};
    auto holder = std::make_shared<Holder>();
    holder->register_module("dict", dict);
    if (rank.index() == 0) dict->get("b")[kBytes - 1] = 9;
    rank.log().clear();
    fully_shard(*holder, {.mesh = rank.mesh(), .sync_from_rank0 = true});
    rank.check_equal(rank.subjects_of("broadcast").size(), size_t{2}, "broadcasts");  // a; b and c
    const auto part = holder->named_parameters()["dict.b"];
    rank.check_equal(part.numel(), kBytes, "the whole");
    rank.check_equal(to_local(part).numel(), kBytes / 2, "half of it here");
    if (rank.index() == 1) rank.check_equal(to_local(part)[kBytes / 2 - 1].item<int>(), 9, "the last byte");
  });
}

TEST_CASE("a buffer that several groups share is sent once", "[runtime][sync_from_rank0]") {
  on_ranks(2, [](Rank& rank) {
    struct Block : nn::Module {
      explicit Block(const Tensor& table) {
        register_module("linear", nn::Linear(2, 2));
        register_buffer("table", table);
      }
    };
    struct Holder : nn::Module {};
    const auto table = torch::full({3}, rank.index() + 1.F);
    auto holder = std::make_shared<Holder>();
    std::vector<std::shared_ptr<Block>> blocks;
    for (const char* name : {"0", "1"}) blocks.push_back(holder->register_module(name, std::make_shared<Block>(table)));
    fully_shard(*blocks[0], {.mesh = rank.mesh(), .sync_from_rank0 = true});
    rank.check_identical(table, torch::ones({3}), "the first rank's");
    table.fill_(10.F + rank.index());  // what a second time would undo
    fully_shard(*blocks[1], {.mesh = rank.mesh(), .sync_from_rank0 = true});
    fully_shard(*holder, {.mesh = rank.mesh(), .sync_from_rank0 = true});
    rank.check_identical(table, torch::full({3}, 10.F + rank.index()), "not sent again");
    rank.check(blocks[1]->buffers()[0].is_same(table), "the same tensor");
  });
}

TEST_CASE("buffers stay this rank's own after construction; an ignored module's are left alone", "[runtime][sync_from_rank0]") {
  on_ranks(2, [](Rank& rank) {
    auto net = net_of(rank.index());
    auto extra = net->register_module("extra", nn::BatchNorm1d(2));
    extra->running_mean.fill_(rank.index());
    fully_shard(net, {.mesh = rank.mesh(), .ignored_modules = {extra}, .sync_from_rank0 = true});
    rank.check_identical(extra->running_mean, torch::full({2}, static_cast<float>(rank.index())), "an ignored module's buffer");
    const auto sent = net->norm->running_mean.clone();
    rank.log().clear();
    net->forward(torch::full({4, 5}, 1.F + rank.index())).sum().backward();
    rank.check(rank.subjects_of("broadcast").empty(), "a step broadcasts nothing");
    rank.check(!net->norm->running_mean.equal(sent), "each rank has statistics of its own");
    const auto other = torch::empty({2, 7});
    rank.world()->start_all_gather(other, net->norm->running_mean, "test")->wait();
    rank.check(!other[0].equal(other[1]), "that differ");

    auto cast = net_of(rank.index());
    fully_shard(cast, {.mesh = rank.mesh(), .mp_policy = {.buffer_dtype = at::kDouble}, .sync_from_rank0 = true});
    rank.check_identical(cast->norm->running_mean, net_of(0)->norm->running_mean.to(at::kDouble), "sent, then cast");
  });
}

TEST_CASE("ranks that differ are told so, all of them, with nothing changed", "[runtime][sync_from_rank0]") {
  on_ranks(3, [](Rank& rank) {
    const auto check_all = [&](const std::shared_ptr<nn::Module>& module, const std::vector<std::string>& parts, const std::string& what) {
      const auto before = module->parameters();
      rank.check_throws<UsageError>([&] { fully_shard(*module, {.mesh = rank.mesh(), .sync_from_rank0 = true}); }, parts, what);
      const auto after = module->parameters();
      for (size_t i = 0; i < before.size(); ++i)
        rank.check(after[i].is_same(before[i]) && !is_fsdp_parameter(after[i]), what + ": unchanged");
    };
    const bool is_odd = rank.index() == 2;
    check_all(nn::Sequential(nn::Linear(3, 3), nn::Linear(3, is_odd ? 4 : 2)).ptr(), {"differ", "1.weight"}, "another shape");
    check_all(nn::Linear(nn::LinearOptions(3, 3).bias(!is_odd)).ptr(), {"from 1 to 2"}, "a parameter more");
    auto half = nn::Linear(3, 3);
    if (is_odd) half->to(at::kHalf);
    check_all(half.ptr(), {"differ", "weight"}, "another dtype");
    MetaDevice meta;
    auto empty = nn::Linear(3, 3);
    check_all(empty.ptr(), {rank.index() == 0 ? "on the first rank" : "rank 0 of the mesh could not"}, "no values on the first rank");
  });
}

TEST_CASE("one rank's own error reaches the others, which do not wait for it", "[runtime][sync_from_rank0]") {
  on_ranks(4, [](Rank& rank) {
    const auto mesh = rank.hybrid(2, 2);
    nn::Linear net(3, 3), other(2, 2);
    const FullyShardOptions options{.mesh = mesh, .sync_from_rank0 = true};
    auto wrong = options;
    if (rank.index() == 3) wrong.ignored_modules = {other.ptr()};
    rank.check_throws<UsageError>([&] { fully_shard(net, wrong); },
                                  {rank.index() == 3 ? "not in the tree" : "rank 3 of the mesh"}, "one wrong call");
    fully_shard(net, options);
    net->forward(torch::ones({1, 3})).sum().backward();
    rank.check(net->parameters()[0].grad().defined(), "and the next call works");
  });
}

/// Splits as process groups do: no rank goes on before all have come.
class Meeting final : public Communicator {
 public:
  explicit Meeting(std::shared_ptr<Communicator> inner)
      : Communicator(inner->rank(), inner->ranks(), inner->name()), inner_(std::move(inner)) {}
  std::string backend() const override { return inner_->backend(); }
  std::shared_ptr<Work> start_all_gather(const Tensor& output, const Tensor& input, std::string_view subject) override {
    return inner_->start_all_gather(output, input, subject);
  }
  std::shared_ptr<Work> start_reduce_scatter(const Tensor& output, const Tensor& input, ReduceOp op,
                                             std::string_view subject) override {
    return inner_->start_reduce_scatter(output, input, op, subject);
  }
  std::shared_ptr<Work> start_all_reduce(const Tensor& tensor, ReduceOp op, std::string_view subject) override {
    return inner_->start_all_reduce(tensor, op, subject);
  }
  std::shared_ptr<Work> start_broadcast(const Tensor& tensor, int root, std::string_view subject) override {
    return inner_->start_broadcast(tensor, root, subject);
  }
  std::shared_ptr<Communicator> split(std::span<const int> ranks, const std::string& name) override {
    inner_->start_broadcast(torch::zeros({3}), 0, "split")->wait();
    auto group = inner_->split(ranks, name);
    return group ? std::make_shared<Meeting>(std::move(group)) : nullptr;
  }
  void abort(const std::string& reason) override { inner_->abort(reason); }

 private:
  std::shared_ptr<Communicator> inner_;
};

TEST_CASE("a rank whose placement function throws keeps no other waiting for the groups of a mesh that it names",
          "[runtime][sync_from_rank0]") {
  on_ranks(8, [](Rank& rank) {
    nn::Linear net(3, 3);
    const auto before = net->weight;
    const auto world = std::make_shared<Meeting>(rank.world());
    FullyShardOptions options{.mesh = init_device_mesh(world, {8}, {"shard"}), .sync_from_rank0 = true};
    options.replicated_params = {net->bias};  // over all ranks of the mesh that it is on: a group that is to be made
    const auto mesh = init_device_mesh(world, {2, 2, 2}, {"other", "replicate", "shard"}).submesh({"replicate", "shard"});
    options.shard_placement_fn = [mesh](const std::string&, const Tensor&) {
      return ShardPlacementResult{Shard{0}, mesh};
    };
    auto wrong = options;
    if (rank.index() == 7)
      wrong.shard_placement_fn = [](const std::string&, const Tensor&) -> std::optional<ShardPlacementResult> {
        throw std::runtime_error("no placement");
      };
    rank.check_throws<std::runtime_error>([&] { fully_shard(net, wrong); },
                                          {rank.index() == 7 ? "no placement" : "rank 7 of the mesh"}, "one wrong call");
    rank.check(net->parameters()[0].is_same(before), "nothing is sharded");
    fully_shard(net, options);
    net->forward(torch::ones({1, 3})).sum().backward();
    rank.check_close(net->parameters()[1].grad(), torch::ones({3}), "and the next call works");
  });
}

}  // namespace
}  // namespace fsdp::test
