#include <catch2/catch.hpp>

#include <cstring>

#include "support/counting_allocator.hpp"
#include "support/models.hpp"
#include "support/odd_model.hpp"

// Parameters that are gathered in another form than their values.

namespace fsdp::test {
namespace {

/// Sends the bytes as they are, and behind them their sum, which it compares. Changes no value.
class Checksum : public AllGatherExtension {
 public:
  std::string name() const override { return "checksum"; }
  bool accepts(at::ScalarType) const override { return true; }
  int64_t encoded_bytes(int64_t numel, at::ScalarType dtype) const override {
    return numel * static_cast<int64_t>(c10::elementSize(dtype)) + 8;
  }
  void pre_all_gather(const at::Tensor& piece, const at::Tensor& encoded) const override {
    const auto bytes = piece.view(at::kByte);
    encoded.narrow(0, 0, bytes.numel()).copy_(bytes);
    const int64_t sum = bytes.sum().item<int64_t>();
    std::memcpy(encoded.mutable_data_ptr<uint8_t>() + bytes.numel(), &sum, sizeof(sum));
  }
  void post_all_gather(const at::Tensor& encoded, at::ScalarType dtype, const at::Tensor& values) const override {
    const int64_t bytes = encoded.size(1) - 8;
    for (int64_t rank = 0; rank < encoded.size(0); ++rank) {
      const auto row = encoded[rank];
      int64_t sum = 0;
      std::memcpy(&sum, row.const_data_ptr<uint8_t>() + bytes, sizeof(sum));
      TORCH_CHECK(sum == row.narrow(0, 0, bytes).sum().item<int64_t>(), "wrong checksum");
      values[rank].copy_(row.narrow(0, 0, bytes).clone().view(dtype));
    }
  }
};

/// The same bytes and nothing else; allocates nothing.
class Identity : public AllGatherExtension {
 public:
  std::string name() const override { return "identity"; }
  int64_t encoded_bytes(int64_t numel, at::ScalarType dtype) const override {
    return numel * static_cast<int64_t>(c10::elementSize(dtype));
  }
  void pre_all_gather(const at::Tensor& piece, const at::Tensor& encoded) const override {
    encoded.copy_(piece.view(at::kByte));
  }
  void post_all_gather(const at::Tensor& encoded, at::ScalarType, const at::Tensor& values) const override {
    values.view(at::kByte).copy_(encoded);
  }
};

template <class Extension>
void use_for_all(FullyShardOptions& options) {
  auto extension = std::make_shared<Extension>();
  options.all_gather_extension_fn = [extension](const std::string&, const at::Tensor&) { return extension; };
}

/// Not for biases: a group with both kinds.
void use_for_matrices(FullyShardOptions& options) {
  auto extension = std::make_shared<Checksum>();
  options.all_gather_extension_fn = [extension](const std::string&, const at::Tensor& parameter) {
    return parameter.dim() > 1 ? extension : nullptr;
  };
}

std::optional<Shard> cut_last(const std::string&, const at::Tensor&) { return Shard{-1}; }

MakeWorkload short_chain(int64_t width = 5) {
  return [width] { return chain_workload(3, width); };
}

TEST_CASE("an extension that changes no value trains like plain, in every setting",
          "[runtime][all_gather_extension]") {
  for (int world_size : {1, 2, 3, 4}) {
    trains_like_plain(short_chain(), {.world_size = world_size, .adjust = use_for_all<Checksum>});
    trains_like_plain(short_chain(), {.world_size = world_size, .micro_batches = 2,
                                .accumulation = Accumulation::kSyncAtLast, .adjust = use_for_matrices});
  }
  trains_like_plain(short_chain(), {.world_size = 4, .replicas = 2, .adjust = use_for_all<Checksum>});
  trains_like_plain(short_chain(), {.world_size = 2, .replicate_only = true, .adjust = use_for_all<Checksum>});
  for (ReshardAfterForward reshard : {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(2)})
    trains_like_plain(short_chain(), {.world_size = 4, .reshard_after_forward = reshard, .adjust = use_for_matrices});
  trains_like_plain(short_chain(), {.world_size = 3, .launches_batches = true, .adjust = use_for_matrices});
  trains_like_plain(short_chain(), {.world_size = 3, .budget_factor = 1.5, .adjust = use_for_all<Identity>});
  trains_like_plain(short_chain(), {.world_size = 3, .dtype = at::kDouble, .adjust = use_for_all<Checksum>});
  trains_like_plain(short_chain(), {.world_size = 3, .adjust = [](FullyShardOptions& options) {
                                use_for_matrices(options);
                                options.shard_placement_fn = cut_last;
                              }});
}

TEST_CASE("with an extension that changes no value, everything is equal bit for bit",
          "[runtime][all_gather_extension]") {
  for (int world_size : {1, 2, 3, 4})
    CHECK(on_ranks(world_size, [](Rank& rank) {
      for (int kind = 0; kind < 4; ++kind) {
        Odd models[] = {plain_odd(), plain_odd()};
        std::vector<at::Tensor> losses[2];
        for (int which : {0, 1}) {
          auto& model = models[which];
          FullyShardOptions options{.mesh = rank.mesh()};
          if (which == 1) use_for_all<Checksum>(options);
          if (kind == 1) options.shard_placement_fn = cut_last;
          if (kind == 2) options.mp_policy = {.param_dtype = at::kBFloat16};
          if (kind == 3 && rank.size() == 4) options.reshard_after_forward = 2;
          fully_shard(model->lin, options);
          fully_shard(model, options);
          torch::optim::SGD optimizer(model->parameters(), 0.1);
          for (int step = 0; step < 3; ++step) {
            Inputs inputs(rank.index(), step);
            optimizer.zero_grad();
            auto loss = model->loss(inputs);
            loss.backward();
            optimizer.step();
            losses[which].push_back(loss.detach());
          }
        }
        for (size_t step = 0; step < losses[0].size(); ++step)
          rank.check_identical(losses[1][step], losses[0][step], fmt::format("loss {}", step));
        const auto expected = unique_parameters(*models[0]), found = unique_parameters(*models[1]);
        for (size_t i = 0; i < expected.size(); ++i) {
          rank.check_identical(found[i].second, expected[i].second, expected[i].first);
          rank.check_identical(found[i].second.grad(), expected[i].second.grad(), expected[i].first + ".grad");
        }
      }
    }));
}

TEST_CASE("the bytes that an encoded gather allocates are those of its plan", "[statistics][memory]") {
  install_counting_allocator();
  for (bool cuts_columns : {false, true})
    for (int world_size : {3, 4}) {
      CAPTURE(world_size, cuts_columns);
      const auto world = simulated_network({.world_size = world_size, .launches_batches = false});
      auto model = seeded(5, [] { return Chain(2, 20); });
      FullyShardOptions options{.mesh = init_device_mesh(world, {world_size}, {"shard"})};
      use_for_all<Identity>(options);
      if (cuts_columns) options.shard_placement_fn = cut_last;
      auto layer = fully_shard(model->layers[1], options);
      const auto root = fully_shard(model, options);
      const auto before = statistics(root).buffer_bytes;
      start_recording();
      layer.unshard();
      const int64_t allocated = allocated_bytes();
      CHECK(allocated == statistics(root).buffer_bytes - before);
      CHECK(allocated > 0);
    }
}

TEST_CASE("parameters with an extension can change their dtype, be cloned and shown in full",
          "[runtime][all_gather_extension]") {
  on_ranks(2, [](Rank& rank) {
    auto model = plain_odd();
    FullyShardOptions options{.mesh = rank.mesh()};
    use_for_all<Checksum>(options);
    fully_shard(model, options);
    auto copy = clone(model);
    fsdp::to(*model, at::kDouble);
    at::NoGradGuard no_grad;
    Inputs in(0, 0, 0, at::kDouble), again(0, 0, 0, at::kFloat);
    const auto tokens = in.integers(7, {4});
    const auto image = in.normal({4, 2, 3, 3});
    rank.check_close(copy->forward(tokens, image.to(at::kFloat)).to(at::kDouble), model->forward(tokens, image),
                     "in double", 1e-4);
    const auto whole = full_tensor(copy->lin->weight);
    FullParameters scope(*copy);
    rank.check_identical(copy->lin->weight.detach(), whole, "in full");
  });
}

TEST_CASE("an extension that throws leaves the group sharded and usable", "[runtime][all_gather_extension]") {
  on_ranks(2, [](Rank& rank) {
    struct Failing : Checksum {
      void post_all_gather(const at::Tensor& encoded, at::ScalarType dtype, const at::Tensor& values) const override {
        if (fails) throw std::runtime_error("cannot decode");
        Checksum::post_all_gather(encoded, dtype, values);
      }
      bool fails = false;
    };
    auto extension = std::make_shared<Failing>();
    auto net = seeded(2, [] { return torch::nn::Linear(3, 3); });
    const auto expected = net->weight.detach().clone();
    const auto module = fully_shard(net, {.mesh = rank.mesh(), .all_gather_extension_fn = [&](auto&, auto&) {
                                            return extension;
                                          }});
    at::NoGradGuard no_grad;
    extension->fails = true;
    rank.check_throws<std::runtime_error>([&] { net->forward(torch::ones({1, 3})); }, {"cannot decode"}, "decode");
    rank.check(!module.is_unsharded(), "sharded");
    rank.check_equal(parameter_bytes(module).unsharded, int64_t{0}, "nothing leaks");
    extension->fails = false;
    rank.check_identical(net->weight.clone(), expected, "usable");
  });
}

}  // namespace
}  // namespace fsdp::test
