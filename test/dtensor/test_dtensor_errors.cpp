#include <catch2/catch.hpp>

#include "fsdp/error.hpp"
#include "programs.hpp"

namespace fsdp::test {

TEST_CASE("who asks for a DTensor's memory learns what to call instead", "[dtensor][errors]") {
  on_ranks(2, [](Rank& rank) {
    const auto tensor = distribute_tensor(torch::zeros({4, 2}), rank.mesh(), {Shard{0}});
    const std::vector<std::string> text = {"has no memory of its own", "fsdp::to_local(tensor)", "fsdp::full_tensor(tensor)"};
    rank.check_throws<std::exception>([&] { tensor.data_ptr<float>(); }, text, "data_ptr");
    rank.check_throws<std::exception>([&] { tensor.const_data_ptr(); }, text, "const_data_ptr");
    rank.check_throws<std::exception>([&] { tensor.accessor<float, 2>(); }, text, "accessor");
    rank.check_throws<std::exception>([&] { tensor.storage().data(); }, text, "the storage's data");
  });
}

TEST_CASE("an operator that would change a DTensor's sizes or memory is refused", "[dtensor][errors]") {
  on_ranks(2, [](Rank& rank) {
    const auto tensor = distribute_tensor(torch::zeros({4, 2}), rank.mesh(), {Shard{0}});
    const std::vector<std::string> text = {"would change the sizes or memory", "copy_ or set_data"};
    rank.check_throws<UsageError>([&] { tensor.resize_({2, 2}); }, text, "resize_");
    rank.check_throws<UsageError>([&] { tensor.t_(); }, text, "t_");
    rank.check_throws<UsageError>([&] { tensor.squeeze_(); }, text, "squeeze_");
    rank.check_throws<UsageError>([&] { tensor.unsqueeze_(0); }, text, "unsqueeze_");
    rank.check_throws<UsageError>([&] { tensor.set_(torch::zeros({4, 2}).storage()); }, text, "set_");
    rank.check_throws<UsageError>([&] { tensor.set_data(torch::zeros({2, 2})); }, {"set_data expects", "(4, 2)", "(2, 2)"}, "set_data");
    rank.check_throws<UsageError>([&] { at::add_out(const_cast<DTensor&>(tensor), torch::zeros({3, 3}), torch::zeros({3, 3})); },
                                  {"would change the sizes"}, "an out that is too small");
  });
}

TEST_CASE("a DTensor's memory cannot be shown as another dtype", "[dtensor][errors]") {
  on_ranks(2, [](Rank& rank) {
    const auto tensor = distribute_tensor(torch::zeros({4, 2}), rank.mesh(), {Shard{0}});
    rank.check_throws<UsageError>([&] { tensor.view(torch::kInt); }, {"another dtype", "full_tensor"}, "view(dtype)");
    const auto numbers = distribute_tensor(torch::zeros({4, 2}, torch::kComplexFloat), rank.mesh(), {Shard{0}});
    rank.check_throws<UsageError>([&] { at::view_as_real(numbers); }, {"another dtype", "full_tensor"}, "view_as_real");
  });
}

TEST_CASE("a DTensor that requires grad is not written while autograd records", "[dtensor][errors]") {
  on_ranks(2, [](Rank& rank) {
    const auto leaf = distribute_tensor(torch::zeros({4, 2}), rank.mesh(), {Shard{0}}).set_requires_grad(true);
    rank.check_throws<c10::Error>([&] { leaf.add_(1); }, {"a leaf Variable that requires grad"}, "a leaf");
    const auto other = distribute_tensor(torch::zeros({4, 2}), rank.mesh(), {Shard{0}});
    rank.check_throws<UsageError>([&] { other.add_(leaf); }, {"autograd cannot record", "NoGradGuard"}, "with a value that needs a gradient");
  });
}

}  // namespace fsdp::test
