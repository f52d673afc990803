#pragma once
// Torch's ProcessGroupGloo.hpp includes headers of gloo, which is compiled into libtorch_cpu but
// whose headers the torch wheel does not carry. The files of this folder declare the names that
// ProcessGroupGloo.hpp mentions, and no more: libfsdp passes such objects around by pointer, never
// calls into them and never makes one, so nothing depends on their layout. This folder comes before
// any gloo of the system, which may be of another version than torch's.

#include <chrono>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

}  // namespace gloo
