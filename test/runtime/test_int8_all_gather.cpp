#include <catch2/catch.hpp>

#include <random>

#include "support/models.hpp"
#include "support/odd_model.hpp"

// Parameters gathered as int8 in blocks with a scale each.

namespace fsdp::test {
namespace {

std::optional<Shard> last_dim(const std::string&, const at::Tensor&) { return Shard{-1}; }

void use_int8(FullyShardOptions& options, int64_t block = 16) {
  options.all_gather_extension_fn = [extension = int8_all_gather(block)](const std::string&, const at::Tensor& p) {
    return at::isFloatingType(p.scalar_type()) ? extension : nullptr;
  };
}

/// What encoding one piece and decoding it gives.
at::Tensor round_trip(const AllGatherExtension& extension, const at::Tensor& piece,
                      at::ScalarType to = at::kFloat) {
  const auto bytes = extension.encoded_bytes(piece.numel(), piece.scalar_type());
  auto encoded = torch::empty({1, (bytes + 15) / 16 * 16}, torch::kByte).narrow(1, 0, bytes);
  extension.pre_all_gather(piece, encoded[0]);
  auto values = torch::empty({1, piece.numel()}, to);
  extension.post_all_gather(encoded, piece.scalar_type(), values);
  return values[0];
}

/// |x - x'| <= scale / 2 in every block of a piece; the rounding of float32 apart.
bool is_within_bound(const at::Tensor& piece, const at::Tensor& shown, int64_t block) {
  for (int64_t begin = 0; begin < piece.numel(); begin += block) {
    const auto count = std::min(block, piece.numel() - begin);
    const auto x = piece.narrow(0, begin, count).to(at::kDouble), y = shown.narrow(0, begin, count).to(at::kDouble);
    const double scale = x.abs().max().item<double>() / 127;
    const double bound = scale < 1.1754943508222875e-38 ? x.abs().max().item<double>() : scale / 2 * (1 + 1e-4);
    if ((x - y).abs().max().item<double>() > bound) return false;
  }
  return true;
}

TEST_CASE("int8 is within half a scale of every value, in blocks of any size", "[runtime][int8_all_gather]") {
  std::mt19937 random(1);
  for (int draw = 0; draw < 300; ++draw) {
    const int64_t numel = 1 + random() % 200, block = 1 + random() % 70;
    const auto extension = int8_all_gather(block);
    CAPTURE(draw, numel, block);
    auto generator = at::make_generator<at::CPUGeneratorImpl>(draw);
    auto piece = torch::randn({numel}, generator) * std::pow(10.0, static_cast<int>(random() % 40) - 20);
    piece.masked_fill_(torch::rand({numel}, generator) < 0.2, 0);
    if (draw % 5 == 1) piece = piece * torch::pow(10, torch::randn({numel}, generator) * 3);
    if (draw % 5 == 2) piece.zero_();
    if (draw % 5 == 3) piece = torch::randn({numel}, generator) * 1e-38;  // with denormal scales
    if (draw % 5 == 4) piece = piece.to(draw % 2 ? at::kDouble : at::kBFloat16);
    const auto bytes = extension->encoded_bytes(numel, piece.scalar_type());
    CHECK(bytes == (numel + block - 1) / block * 4 + numel);
    const auto shown = round_trip(*extension, piece);
    CHECK(shown.isfinite().all().item<bool>());
    CHECK(is_within_bound(piece, shown, block));
    CHECK((shown.masked_select(piece.eq(0)).eq(0)).all().item<bool>());
    CHECK(round_trip(*extension, piece).equal(shown));  // backward sees what forward saw
  }
}

TEST_CASE("int8 keeps the largest value of a block, and one value alone, but for rounding",
          "[runtime][int8_all_gather]") {
  const auto piece = torch::tensor({0.5f, -3.0f, 1.0f, 7.0f});
  const auto shown = round_trip(*int8_all_gather(2), piece);
  CHECK(std::abs(shown[1].item<float>() + 3) < 1e-6);
  CHECK(std::abs(shown[3].item<float>() - 7) < 1e-6);
  CHECK((round_trip(*int8_all_gather(1), piece) - piece).abs().max().item<float>() < 1e-6);
}

TEST_CASE("int8 shows a block with an infinity or a NaN as NaN, and only that block",
          "[runtime][int8_all_gather]") {
  for (float bad : {INFINITY, -INFINITY, NAN}) {
    auto piece = torch::linspace(-1, 1, 12);
    piece[5] = bad;
    const auto shown = round_trip(*int8_all_gather(4), piece);
    CHECK(shown.narrow(0, 4, 4).isnan().all().item<bool>());
    CHECK(shown.narrow(0, 0, 4).isfinite().all().item<bool>());
    CHECK(shown.narrow(0, 8, 4).isfinite().all().item<bool>());
  }
  const auto beyond_float = torch::full({2}, 1e300, at::kDouble);
  CHECK(round_trip(*int8_all_gather(4), beyond_float, at::kDouble).isnan().all().item<bool>());
}

TEST_CASE("unsharded parameters show each rank's piece within half a scale; whole parameters are exact",
          "[runtime][int8_all_gather]") {
  for (int world_size : {2, 3, 4})
    CHECK(on_ranks(world_size, [](Rank& rank) {
      constexpr int64_t kBlock = 8;
      std::mt19937 random(3);
      for (int draw = 0; draw < 12; ++draw) {
        // also fewer rows than ranks
        const int64_t out = 1 + random() % 9, in = 1 + random() % 9;
        const bool cuts_columns = draw % 3 == 2;
        auto net = seeded(draw, [&] { return torch::nn::Linear(in, out); });
        const auto original = net->weight.detach().clone();
        FullyShardOptions options{.mesh = rank.mesh()};
        if (draw % 3 == 1) options.mp_policy = {.param_dtype = at::kDouble};
        if (cuts_columns) options.shard_placement_fn = last_dim;
        use_int8(options, kBlock);
        fully_shard(net, options);
        at::NoGradGuard no_grad;
        const auto shown = net->weight.clone();
        const auto what = fmt::format("{} x {}, draw {}", out, in, draw);
        rank.check(shown.scalar_type() == (draw % 3 == 1 ? at::kDouble : at::kFloat), what + ": dtype");
        rank.check_identical(full_tensor(net->weight), original, what + ": whole");
        const int64_t dim = cuts_columns ? 1 : 0;
        const int64_t rows = original.size(dim), chunk = (rows + rank.size() - 1) / rank.size();
        for (int64_t begin = 0; begin < rows; begin += chunk) {
          const auto count = std::min(chunk, rows - begin);
          const auto piece_of = [&](const at::Tensor& whole) { return whole.narrow(dim, begin, count).flatten(); };
          rank.check(is_within_bound(piece_of(original), piece_of(shown), kBlock), what + ": error");
        }
      }
    }));
}

TEST_CASE("int8 moves about a quarter of the bytes, and statistics count them exactly",
          "[runtime][int8_all_gather]") {
  for (bool batches : {false, true})
    CHECK(on_ranks(
        4,
        [batches](Rank& rank) {
          constexpr int64_t kWidth = 64, kBlock = 64;
          auto gathered = [&](bool is_int8) {
            auto model = seeded(5, [&] { return Chain(3, kWidth); });
            FullyShardOptions options{.mesh = rank.mesh(), .reshard_after_forward = true};
            if (is_int8) use_int8(options, kBlock);
            for (auto& layer : model->layers) fully_shard(layer, options);
            const auto root = fully_shard(model, options);
            rank.log().clear();
            for (int step = 0; step < 2; ++step) {
              Inputs inputs(rank.index(), step);
              model->forward(inputs.normal({4, kWidth})).sum().backward();
            }
            int64_t bytes = 0;
            for (const auto& call : rank.log().calls)
              if (call.operation == "all_gather") bytes += call.bytes;
            const auto counted = statistics(root);
            // Values that travel from place to place leave the gaps between them out.
            if (is_int8 || !batches) rank.check_equal(counted.gathered_bytes, bytes, "statistics");
            if (is_int8) {
              // a layer's weight: 16 rows of 64 in each piece; its bias: 16 elements
              const int64_t layer = 4 * ((16 * 64 + 16 * 4) + (16 + 16));
              for (const auto& call : rank.log().calls)
                if (call.operation == "all_gather" && call.subject.starts_with("layer"))
                  rank.check_equal(call.bytes, layer, call.subject);
            }
            return static_cast<double>(bytes);
          };
          const double ratio = gathered(true) / gathered(false);
          rank.check(ratio < 0.28 && ratio > 0.25, fmt::format("a quarter and the scales: {}", ratio));
        },
        {.timeout = patience(), .launches_batches = batches}));
}

TEST_CASE("a model trained with int8 gathers stays close to plain, and at one rank equals it bit for bit",
          "[runtime][int8_all_gather]") {
  for (int world_size : {1, 2, 4})
    CHECK(on_ranks(world_size, [](Rank& rank) {
      auto plain = plain_chain(3, 16), model = plain_chain(3, 16);
      FullyShardOptions options{.mesh = rank.mesh(), .reshard_after_forward = rank.size() == 4 ? ReshardAfterForward(2) : ReshardAfterForward()};
      use_int8(options, 32);
      for (auto& layer : model->layers) fully_shard(layer, options);
      fully_shard(model, options);
      torch::optim::SGD plain_optimizer(plain->parameters(), 0.3), optimizer(model->parameters(), 0.3);
      double first = 0, last = 0;
      for (int step = 0; step < 12; ++step) {
        Inputs inputs(0, 0);  // one batch, learned by heart
        const auto x = inputs.normal({8, 16}), y = inputs.normal({8, 2});
        auto loss_of = [&](Chain& chain) { return (chain->forward(x) - y).square().mean(); };
        plain_optimizer.zero_grad();
        optimizer.zero_grad();
        const auto expected = loss_of(plain), loss = loss_of(model);
        expected.backward();
        loss.backward();
        plain_optimizer.step();
        optimizer.step();
        if (rank.size() == 1)
          rank.check_identical(loss.detach(), expected.detach(), "one rank");
        else
          rank.check(std::abs(loss.item<double>() - expected.item<double>()) < 0.02 * std::max(first, loss.item<double>()),
                     fmt::format("step {}: {} close to {}", step, loss.item<double>(), expected.item<double>()));
        if (step == 0) first = loss.item<double>();
        last = loss.item<double>();
      }
      rank.check(last < 0.6 * first, fmt::format("it learns: {} to {}", first, last));
    }));
}

TEST_CASE("a write through a member reaches the shards as it was written, the rest keeps its bits",
          "[runtime][int8_all_gather]") {
  for (int world_size : {2, 3})
    CHECK(on_ranks(world_size, [](Rank& rank) {
      for (bool cuts_columns : {false, true}) {
        auto net = seeded(2, [] { return torch::nn::Linear(6, 7); });
        auto expected = net->weight.detach().clone();
        FullyShardOptions options{.mesh = rank.mesh()};
        use_int8(options, 4);
        if (cuts_columns) options.shard_placement_fn = last_dim;
        fully_shard(net, options);
        at::NoGradGuard no_grad;
        net->weight[3].fill_(0.123f);
        expected[3].fill_(0.123f);
        net->weight.select(1, 1).mul_(0);
        expected.select(1, 1).mul_(0);
        rank.check_identical(full_tensor(net->weight), expected, "written");
      }
    }));
}

TEST_CASE("after forward with an integer reshard, backward gathers the values that forward saw",
          "[runtime][int8_all_gather]") {
  on_ranks(4, [](Rank& rank) {
    auto model = plain_chain(2, 8);
    FullyShardOptions options{.mesh = rank.mesh(), .reshard_after_forward = 2};
    use_int8(options, 16);
    fully_shard(model->layers[1], options);
    fully_shard(model, {.mesh = rank.mesh()});
    rank.log().clear();
    Inputs inputs(rank.index(), 0);
    model->forward(inputs.normal({2, 8})).square().mean().backward();
    std::vector<int64_t> bytes;
    for (const auto& call : rank.log().calls)
      if (call.operation == "all_gather" && call.subject == "layer1") bytes.push_back(call.bytes);
    // pieces of 16 and 2 elements with a scale each, padded to 16 bytes; then as floats
    rank.check_equal(bytes, std::vector<int64_t>{4 * (32 + 16), 4 * (64 + 16)}, "encoded, then as values");
  });
}

TEST_CASE("what cannot be encoded is refused by name, with nothing changed", "[runtime][int8_all_gather]") {
  CHECK_THROWS_AS(int8_all_gather(0), UsageError);
  for (int world_size : {1, 2})
    CHECK(on_ranks(world_size, [](Rank& rank) {
      auto model = plain_odd();
      FullyShardOptions options{.mesh = rank.mesh()};
      options.all_gather_extension_fn = [](const std::string&, const at::Tensor&) { return int8_all_gather(); };
      rank.check_throws<UsageError>([&] { fully_shard(model, options); }, {"table", "int8 in blocks of 128", "Long"},
                                    "integers");
      options.layout = ParamLayout::kFlat;
      use_int8(options);
      rank.check_throws<UsageError>([&] { fully_shard(model, options); }, {"flat", "kPerParameter", "int8"}, "flat");
      rank.check(!find_fsdp_module(*model), "nothing is sharded");
      options.layout = ParamLayout::kPerParameter;
      fully_shard(model, options);
    }));
}

}  // namespace
}  // namespace fsdp::test
