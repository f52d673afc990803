#include <catch2/catch.hpp>

#include "schedule/forward_passes.hpp"

using fsdp::ForwardPasses;

TEST_CASE("A pass of one module is over with its forward, and another begins", "[schedule][forward_passes]") {
  ForwardPasses passes(1);
  for (int pass = 0; pass < 2; ++pass) {
    passes.enter(0);
    CHECK(passes.is_inside());
    CHECK(passes.leave());
    CHECK(!passes.is_inside());
  }
}

TEST_CASE("A pass of several modules is over when the last of them has run", "[schedule][forward_passes]") {
  ForwardPasses passes(3);
  passes.enter(2);
  CHECK(!passes.leave());
  passes.enter(0);
  CHECK(!passes.leave());
  passes.enter(0);  // again, as a shared module does
  CHECK(!passes.leave());
  passes.enter(1);
  CHECK(passes.leave());

  passes.enter(1);
  CHECK(!passes.leave());  // the others wait in the next pass
}

TEST_CASE("A pass goes on while a forward inside another one ends", "[schedule][forward_passes]") {
  ForwardPasses passes(2);
  passes.enter(0);
  passes.enter(1);
  CHECK(!passes.leave());
  CHECK(passes.is_inside());
  CHECK(passes.leave());
}

TEST_CASE("What an exception has left of a pass is forgotten when it begins anew", "[schedule][forward_passes]") {
  ForwardPasses passes(2);
  passes.enter(0);
  passes.enter(1);

  passes.begin_anew();

  CHECK(!passes.is_inside());
  passes.enter(0);
  CHECK(!passes.leave());
}
