// The tensors of one collective's launch after another's: beside views that are made anew.
#include <ATen/ATen.h>

#include <catch2/catch.hpp>
#include <random>
#include <vector>

#include "base/raw_view.hpp"
#include "collectives/view_pool.hpp"

namespace fsdp::test {
namespace {

bool is_like(const at::Tensor& view, const at::Tensor& made) {
  return view.data_ptr() == made.data_ptr() && view.sizes() == made.sizes() && view.strides() == made.strides() &&
         view.dtype() == made.dtype() && view.storage_offset() == made.storage_offset() && view.device() == made.device() &&
         view.storage().nbytes() == made.storage().nbytes() && view.key_set() == made.key_set();
}

}  // namespace

TEST_CASE("a pool's views are those that raw_view makes, launch after launch", "[collectives][view_pool]") {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 draw(seed);
    ViewPool pool;
    std::vector<std::pair<at::Tensor, at::Tensor>> held;  // by a collective that is not done: the view, and what it showed
    for (int launch = 0; launch < 8; ++launch) {
      const auto dtype = draw() % 6 == 0 ? at::kDouble : at::kFloat;
      std::vector<at::Tensor> expected;
      const auto common = at::rand({20}, dtype);
      const bool has_common = draw() % 2 == 0;
      if (has_common)
        pool.begin(common);
      else
        pool.begin();
      for (size_t count = 1 + draw() % 5, i = 0; i < count; ++i) {
        const auto base = has_common && draw() % 4 != 0 ? common : at::rand({20}, draw() % 20 == 0 ? at::kDouble : dtype);
        if (draw() % 5 == 0) {
          pool.add(base);
          expected.push_back(base);
          continue;
        }
        const auto numel = static_cast<int64_t>(draw() % 8), offset = static_cast<int64_t>(draw() % 12);
        pool.add(base, numel, offset);
        expected.push_back(raw_view(base, numel, offset));
      }
      const auto tensors = pool.tensors();
      REQUIRE(tensors.size() == expected.size());
      for (size_t i = 0; i < expected.size(); ++i) CHECK(is_like(tensors[i], expected[i]));
      if (draw() % 3 == 0) held.emplace_back(tensors[0], expected[0].clone());
      if (draw() % 5 == 0) {
        // Of one, the storage alone.
        const auto& last = tensors.back();
        held.emplace_back(at::empty({0}, last.options()).set_(last.storage(), last.storage_offset(), last.sizes(), last.strides()),
                          expected.back().clone());
      }
      for (const auto& [view, values] : held) CHECK(view.equal(values));
      pool.let_go();
      CHECK(pool.tensors().empty());
      for (const auto& [view, values] : held) CHECK(view.equal(values));
    }
  }
}

TEST_CASE("a view is made once, and holds no memory between two launches", "[collectives][view_pool]") {
  ViewPool pool;
  const at::TensorImpl* first = nullptr;
  for (int launch = 0; launch < 3; ++launch) {
    const auto base = at::zeros({8});
    pool.begin();
    pool.add(base, 4, 2);
    const auto* impl = pool.tensors()[0].unsafeGetTensorImpl();
    if (launch == 0) first = impl;
    CHECK(impl == first);
    CHECK(base.storage().use_count() == 2);
    pool.let_go();
    CHECK(base.storage().use_count() == 1);
  }
}

TEST_CASE("views of one tensor let go of its memory at once", "[collectives][view_pool]") {
  ViewPool pool;
  const at::TensorImpl* first = nullptr;
  for (int launch = 0; launch < 3; ++launch) {
    const auto base = at::zeros({8});
    pool.begin(base);
    pool.add(base, 4, 2);
    pool.add(base, 2, 6);
    const auto* impl = pool.tensors()[1].unsafeGetTensorImpl();
    if (launch == 0) first = impl;
    CHECK(impl == first);
    CHECK(base.storage().use_count() == 2);
    pool.let_go();
    CHECK(base.storage().use_count() == 1);
    CHECK(impl->storage().data() == nullptr);
  }
}

TEST_CASE("a view that a collective still holds is left to it, with its memory", "[collectives][view_pool]") {
  ViewPool pool;
  auto base = at::full({4}, 7.0);
  pool.begin();
  pool.add(base, 4, 0);
  const at::Tensor held = pool.tensors()[0];
  base.reset();
  pool.let_go();
  const auto other = at::zeros({4});
  pool.begin();
  pool.add(other, 4, 0);
  CHECK(!pool.tensors()[0].is_same(held));
  CHECK(held.equal(at::full({4}, 7.0)));
}

}  // namespace fsdp::test
