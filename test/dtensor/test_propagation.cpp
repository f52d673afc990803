#include <catch2/catch.hpp>

#include <limits>
#include <sstream>

#include "programs.hpp"

namespace fsdp::test {
namespace {

/// One result for each leaf, and the leaves.
template <class Each>
Program over_leaves(const Each& each) {
  return [each](Leaves& leaves) {
    leaves.set_gradients(0);
    const torch::NoGradGuard no_grad;
    Tensors results;
    for (const auto& leaf : leaves.all()) results.push_back(each(leaf));
    results.insert(results.end(), leaves.all().begin(), leaves.all().end());
    return results;
  };
}

/// Leaves of so many dimensions are initialized with the process's random numbers, which ranks that are threads share: nothing of it may
/// wait for another rank.
template <class Init>
void check_init(const std::string& name, const Init& init, int64_t least_dims) {
  check_program(name, [&](Leaves& leaves) {
    return seeded(3, [&] {
      for (const auto& leaf : leaves.all())
        if (leaf.dim() >= least_dims) init(leaf);
      return leaves.all();
    });
  });
}

/// The same on one rank, for what gathers.
template <class Init>
void check_init_alone(const std::string& name, const Init& init) {
  on_ranks(1, [&](Rank& rank) {
    Leaves plain, spread(rank.mesh(), {Shard{0}});
    const auto run = [&](Leaves& leaves) {
      return seeded(3, [&] {
        for (const auto& leaf : leaves.all())
          if (leaf.dim() == 2) init(leaf);
        return leaves.all();
      });
    };
    const auto wanted = run(plain);
    check_alike(rank, run(spread), wanted, name);
  });
}

std::string printed(const at::Tensor& tensor) {
  std::ostringstream out;
  out << tensor;
  return out.str();
}

}  // namespace

TEST_CASE("initializers draw the unsharded program's numbers into DTensors", "[dtensor][init]") {
  namespace init = torch::nn::init;
  check_init("normal_", [](const auto& leaf) { init::normal_(leaf); }, 0);
  check_init("uniform_", [](const auto& leaf) { init::uniform_(leaf, -1, 2); }, 0);
  check_init("xavier_uniform_", [](const auto& leaf) { init::xavier_uniform_(leaf); }, 2);
  check_init("xavier_normal_", [](const auto& leaf) { init::xavier_normal_(leaf, 2); }, 2);
  check_init("kaiming_uniform_", [](const auto& leaf) { init::kaiming_uniform_(leaf); }, 2);
  check_init("kaiming_normal_", [](const auto& leaf) { init::kaiming_normal_(leaf, 0, torch::kFanOut); }, 2);
  check_init("constant_", [](const auto& leaf) { init::constant_(leaf, 3); }, 0);
  check_init_alone("orthogonal_", [](const auto& leaf) { init::orthogonal_(leaf); });
  check_init_alone("sparse_", [](const auto& leaf) { init::sparse_(leaf, 0.5); });
}

TEST_CASE("initializers without random numbers write DTensors", "[dtensor][init]") {
  namespace init = torch::nn::init;
  check_program("eye_ and dirac_", [](Leaves& leaves) {
    for (const auto& leaf : leaves.all()) {
      if (leaf.dim() == 2) init::eye_(leaf);
      if (leaf.dim() == 4) init::dirac_(leaf);
    }
    return leaves.all();
  });
}

TEST_CASE("set_data of a DTensor keeps it a DTensor, whichever tensor it is given", "[dtensor][set_data]") {
  check_program("of a DTensor", over_leaves([](const at::Tensor& leaf) {
    leaf.set_data(leaf.data() - 0.1 * leaf.grad());
    return leaf + 1;
  }));
  check_program("of an ordinary tensor", over_leaves([](const at::Tensor& leaf) {
    leaf.set_data(torch::full(leaf.sizes(), 2.0F));
    return leaf + 1;
  }));
  on_ranks(2, [](Rank& rank) {
    DTensor tensor = distribute_tensor(torch::zeros({3, 2}), rank.mesh(), {Shard{0}});
    tensor.set_data(torch::arange(6.0).reshape({3, 2}));
    rank.check(is_dtensor(tensor), "is a DTensor");
    rank.check_identical(tensor.to_local(), torch::arange(6.0).reshape({3, 2}).narrow(0, rank.index() * 2, 2 - rank.index()), "rows");
  });
}

TEST_CASE("an ordinary tensor that takes a DTensor's data becomes the whole", "[dtensor][set_data]") {
  check_program("set_data of an ordinary tensor", over_leaves([](const at::Tensor& leaf) {
    auto whole = torch::zeros(leaf.sizes());
    whole.set_data(leaf.detach().clone());
    return whole.mul_(2).sub(leaf);
  }));
}

TEST_CASE("DTensors and ordinary tensors are copied to each other", "[dtensor][propagation]") {
  check_program("copy_", over_leaves([](const at::Tensor& leaf) {
    auto whole = torch::zeros(leaf.sizes());
    whole.copy_(leaf);
    leaf.copy_(whole * 2);
    return whole;
  }));
}

TEST_CASE("a view of a DTensor shows what is written to either", "[dtensor][view]") {
  check_program("rows, columns and parts", over_leaves([](const at::Tensor& leaf) {
    if (leaf.dim() < 2) return leaf.detach();
    const auto before = leaf.transpose(0, 1);
    leaf[0].fill_(3);
    leaf.slice(0, 1, 2).mul_(2);
    leaf.select(1, 0).add_(1);
    leaf.transpose(0, 1)[1].zero_();
    leaf.view(-1).narrow(0, 1, 2).fill_(7);
    leaf.masked_fill_(leaf > 2.5, 0.5);
    return before;
  }));
}

TEST_CASE("a view of a Partial DTensor writes to what it shows", "[dtensor][view]") {
  on_ranks(2, [](Rank& rank) {
    const auto tensor = DTensor::from_local(torch::full({2, 2}, rank.index() + 1.0), rank.mesh(), {Partial{}});
    tensor.select(0, 1).fill_(7);
    rank.check_identical(tensor.full_tensor(), torch::tensor({{3.0, 3.0}, {7.0, 7.0}}), "the sum");
  });
}

TEST_CASE("a reshape that joins a sharded dimension with others gives the whole's elements", "[dtensor][view]") {
  on_ranks(2, [](Rank& rank) {
    const auto whole = torch::arange(24.0).reshape({4, 3, 2});
    const DTensor tensor = distribute_tensor(whole, rank.mesh(), {Shard{2}});
    rank.check_identical(whole_of(tensor.transpose(0, 1).reshape({3, 8})), whole.transpose(0, 1).reshape({3, 8}), "copied");
    rank.check_identical(whole_of(tensor.reshape({12, 2})), whole.reshape({12, 2}), "shown");
  });
}

TEST_CASE("a scalar that is held by one rank is a scalar to operators on all", "[dtensor][propagation]") {
  on_ranks(3, [](Rank& rank) {
    const auto scalar = distribute_tensor(torch::tensor(2.0F), rank.mesh(), {Shard{0}});
    const auto other = distribute_tensor(torch::tensor(3.0, torch::kDouble), rank.mesh(), {Shard{0}});
    const auto power = scalar.pow(other);
    rank.check(power.dim() == 0 && power.scalar_type() == torch::kDouble, "promoted as two scalars");
    rank.check_identical(whole_of(power), torch::tensor(8.0, torch::kDouble), "its value");
    const auto product = torch::tensor(2.0, torch::kDouble) * scalar;
    rank.check(product.dim() == 0 && product.scalar_type() == torch::kDouble, "promoted with an ordinary scalar");
    rank.check_identical(whole_of(product), torch::tensor(4.0, torch::kDouble), "the product");
  });
}

TEST_CASE("a rank without rows refuses what the others refuse", "[dtensor][propagation]") {
  on_ranks(3, [](Rank& rank) {
    const auto flags = distribute_tensor(torch::ones({2, 2}, torch::kBool), rank.mesh(), {Shard{0}});
    rank.check_throws<c10::Error>([&] { flags.cumprod_(1); }, {"not implemented"}, "cumprod_ of bool");
    rank.check_throws<c10::Error>([&] { flags.neg(); }, {"bool"}, "neg of bool");
    const auto numbers = distribute_tensor(torch::ones({2, 2}), rank.mesh(), {Shard{0}});
    rank.check_throws<c10::Error>([&] { numbers.norm(2, torch::kLong); }, {"Long"}, "norm in whole numbers");
    rank.check_throws<c10::Error>([&] { numbers.norm(2, 1, false, torch::kLong); }, {"Long"}, "norms of rows in whole numbers");
    rank.check_throws<c10::Error>([&] { numbers.norm(2, 0, false, torch::kHalf); }, {"Half"}, "norms of columns in fewer bits");
    const auto float8 = distribute_tensor(torch::ones({2, 2}).to(torch::kFloat8_e5m2), rank.mesh(), {Shard{0}});
    rank.check_throws<c10::Error>([&] { float8.amax(); }, {"not implemented"}, "amax of eight bits");
  });
}

TEST_CASE("norms of several tensors are the whole's where a rank has no elements", "[dtensor][propagation]") {
  on_ranks(3, [](Rank& rank) {
    const auto one = distribute_tensor(torch::tensor({-3.0F}), rank.mesh(), {Shard{0}});
    const auto two = distribute_tensor(torch::tensor({4.0F, 2.0F}), rank.mesh(), {Shard{0}});
    for (const double p : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
      const auto norms = at::_foreach_norm({one, two}, p);
      const auto what = fmt::format("norm {} ", p);
      rank.check_close(whole_of(norms[0]), torch::tensor(3.0F), what + "of one element");
      rank.check_close(whole_of(norms[1]), torch::linalg_vector_norm(torch::tensor({4.0F, 2.0F}), p), what + "of two");
    }
  });
}

TEST_CASE("an empty DTensor has its strides in every operator", "[dtensor][propagation]") {
  on_ranks(2, [](Rank& rank) {
    const auto empty = distribute_tensor(torch::zeros({0, 3, 2}), rank.mesh(), {Shard{2}});
    rank.check_equal(at::view_as_complex_copy(empty).sizes().vec(), std::vector<int64_t>{0, 3}, "as complex numbers");
  });
}

TEST_CASE("equal answers for the whole on every rank", "[dtensor][propagation]") {
  on_ranks(2, [](Rank& rank) {
    const auto one = distribute_tensor(torch::zeros({4}), rank.mesh(), {Shard{0}});
    const auto other = distribute_tensor(torch::tensor({0.0F, 0.0F, 0.0F, 1.0F}), rank.mesh(), {Shard{0}});
    rank.check(!at::equal(one, other) && at::equal(one, one.clone()), "the same answer");
  });
}

TEST_CASE("what has no gradient is computed on pieces where autograd is on, too", "[dtensor][propagation]") {
  const auto run = [](const at::Tensor& leaf) {
    return Tensors{leaf.eq(0), leaf.gt(0.1), leaf.isnan(), leaf.signbit(), leaf.logical_not(), leaf.logical_or(leaf.lt(0))};
  };
  on_worlds([&](Rank& rank, const DeviceMesh& mesh, const std::vector<Placement>& placements) {
    const auto whole = values({5, 3}, 1);
    const auto leaf = distribute_tensor(whole, mesh, placements).set_requires_grad(true);
    rank.log().clear();
    const auto results = run(leaf);
    rank.check_equal(rank.calls().size(), size_t{0}, "collectives");
    check_alike(rank, results, run(whole), "results");
  });
}

TEST_CASE("batch norm updates its statistics where they are DTensors", "[dtensor][propagation]") {
  on_ranks(2, [](Rank& rank) {
    const auto input = values({4, 3, 5}, 1);
    const auto run = [&](const at::Tensor& mean, const at::Tensor& variance) {
      torch::batch_norm(input, {}, {}, mean, variance, true, 0.1, 1e-5, false);
      return Tensors{mean, variance};
    };
    const auto spread = [&](const at::Tensor& whole) { return distribute_tensor(whole, rank.mesh(), {Shard{0}}); };
    check_alike(rank, run(spread(torch::zeros({3})), spread(torch::ones({3}))), run(torch::zeros({3}), torch::ones({3})), "statistics");
  });
}

TEST_CASE("a copy in another memory format lies in that format", "[dtensor][propagation]") {
  on_ranks(2, [](Rank& rank) {
    const auto tensor = distribute_tensor(values({3, 4}, 1).t(), rank.mesh(), {Shard{0}});
    rank.check_equal(tensor.clone().strides().vec(), std::vector<int64_t>{1, 4}, "kept");
    rank.check_equal(tensor.clone(at::MemoryFormat::Contiguous).strides().vec(), std::vector<int64_t>{3, 1}, "row-major");
    rank.check_equal(tensor.new_zeros({4, 3}).strides().vec(), std::vector<int64_t>{3, 1}, "new memory");
  });
}

TEST_CASE("a DTensor is printed as its whole", "[dtensor][print]") {
  on_worlds([](Rank& rank, const DeviceMesh& mesh, const std::vector<Placement>& placements) {
    const auto whole = values({5, 3}, 1);
    rank.check_equal(printed(distribute_tensor(whole, mesh, placements)), printed(whole), "text");
  });
}

TEST_CASE("gradients of DTensors accumulate as those of ordinary tensors", "[dtensor][autograd]") {
  check_program("backward twice", [](Leaves& leaves) {
    leaves.loss().backward();
    leaves.loss().backward();
    return leaves.gradients();
  });
  check_program("autograd::grad", [](Leaves& leaves) { return torch::autograd::grad({leaves.loss()}, leaves.all()); });
}

TEST_CASE("DTensors work in inference mode", "[dtensor][propagation]") {
  check_program("inference", [](Leaves& leaves) {
    leaves.set_gradients(0);
    const c10::InferenceMode inference;
    Tensors results;
    for (const auto& leaf : leaves.all()) {
      auto average = leaf.clone();
      average.mul_(0.9).add_(leaf, 0.1);
      results.push_back(average.view(-1) * average.norm());
    }
    return results;
  });
}

}  // namespace fsdp::test
